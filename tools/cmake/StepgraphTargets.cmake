# Settings of all targets: language, warnings, sanitizers, include paths.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>")  # messages name files of the project

# A compiler cache, shared by presets and by clones in different folders.
if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER AND NOT DEFINED ENV{CMAKE_CXX_COMPILER_LAUNCHER})
  find_program(STEPGRAPH_CCACHE ccache)
  if(STEPGRAPH_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
        CCACHE_IGNOREOPTIONS=-fmacro-prefix-map=* ${STEPGRAPH_CCACHE})
    # ccache makes paths relative to the build folder. (Debug information may name the clone that compiled first.)
    file(RELATIVE_PATH to_source ${CMAKE_BINARY_DIR} ${PROJECT_SOURCE_DIR})
    if(NOT to_source MATCHES "/$")
      string(APPEND to_source "/")
    endif()
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fmacro-prefix-map=${to_source}=>")
  endif()
endif()

add_library(stepgraph_warnings INTERFACE)
add_library(stepgraph::warnings ALIAS stepgraph_warnings)
target_compile_options(stepgraph_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor>)
if(PROJECT_IS_TOP_LEVEL)  # another project's compiler may know warnings that ours does not
  target_compile_options(stepgraph_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror -Wno-error=deprecated-declarations>)
endif()

# All libraries; stepgraph_library adds to it.
add_library(stepgraph_all INTERFACE)
add_library(stepgraph::stepgraph ALIAS stepgraph_all)
set_target_properties(stepgraph_all PROPERTIES EXPORT_NAME stepgraph)

# Build type Sanitize: fast enough for every day, with line numbers in reports, and three times as fast to compile.
set(CMAKE_CXX_FLAGS_SANITIZE "-O1 -g1")
if(STEPGRAPH_SANITIZE)
  # GCC's flow analysis warns about its own instrumentation.
  add_compile_options(-Wno-maybe-uninitialized -Wno-restrict)
  add_compile_options(-fsanitize=${STEPGRAPH_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${STEPGRAPH_SANITIZE})
endif()

# For programs around the libraries.
function(stepgraph_program target)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE stepgraph::warnings)
endfunction()

# For large programs that do little work themselves, such as tests and command lines: compiles with less optimisation. The
# libraries come first on the linker's command line: of equal inline functions the linker keeps the first, so optimised
# code stays optimised.
function(stepgraph_compile_quickly target)
  target_compile_options(${target} PRIVATE $<IF:$<CONFIG:Sanitize>,-O0,-O1>)
  target_link_options(${target} PRIVATE "SHELL:-Wl,--whole-archive \
$<TARGET_FILE:stepgraph_engine> $<TARGET_FILE:stepgraph_ops> $<TARGET_FILE:stepgraph_graphs> \
$<TARGET_FILE:stepgraph_backends> -Wl,--no-whole-archive")
endfunction()

# stepgraph_library(folder SOURCES ... HEADERS ... LINK ... PRIVATE_LINK ... BUILD_LINK ...): the library of one folder.
# Users of the static library link PRIVATE_LINK too. BUILD_LINK is only needed to compile the library.
function(stepgraph_library folder)
  cmake_parse_arguments(arg "" "" "SOURCES;HEADERS;LINK;PRIVATE_LINK;BUILD_LINK" ${ARGN})
  set(target stepgraph_${folder})
  add_library(${target} STATIC ${arg_SOURCES})
  add_library(stepgraph::${folder} ALIAS ${target})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${arg_HEADERS})
  target_link_libraries(${target} PUBLIC ${arg_LINK} PRIVATE ${arg_PRIVATE_LINK})
  foreach(needed IN ITEMS stepgraph::warnings LISTS arg_BUILD_LINK)
    target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:${needed}>)
  endforeach()
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder} VERIFY_INTERFACE_HEADER_SETS ON
                                             POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(stepgraph_all INTERFACE ${target})
endfunction()

# stepgraph_use_march(target): compiles for the processors that STEPGRAPH_MARCH names. Headers for other targets must not
# depend on it.
function(stepgraph_use_march target)
  if(STEPGRAPH_MARCH STREQUAL "")
    return()
  endif()
  include(CheckCXXCompilerFlag)
  string(MAKE_C_IDENTIFIER "STEPGRAPH_TAKES_MARCH_${STEPGRAPH_MARCH}" taken)
  check_cxx_compiler_flag(-march=${STEPGRAPH_MARCH} ${taken})
  if(NOT ${taken})
    message(FATAL_ERROR "STEPGRAPH_MARCH is '${STEPGRAPH_MARCH}', which the compiler does not support (native, a "
                        "value of -march= such as x86-64-v3, or empty for the baseline)")
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-march=${STEPGRAPH_MARCH}>)
endfunction()

# Taskflow and TBB synchronise with fences and with a library that ThreadSanitizer does not see. Files that include them
# are compiled without it. The edges of the graph are annotated instead (engine/run/tsan.hpp), so a race between node
# bodies is still reported and no suppression is needed. Files that only use memory of one thread are compiled without it
# too. List these files last in a library: of equal inline functions the linker keeps the first, which should be checked.
function(stepgraph_hide_from_tsan)
  if(STEPGRAPH_SANITIZE MATCHES "thread")
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=thread)
  endif()
endfunction()

# Sets CUDNN_INCLUDE_DIR and CUDNN_LIBRARY, which CUDAToolkit does not.
function(stepgraph_find_cudnn)
  find_path(CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR})
  if(NOT CUDNN_INCLUDE_DIR OR NOT CUDNN_LIBRARY)
    message(FATAL_ERROR "STEPGRAPH_WITH_CUDA is ON, but cuDNN 9 was not found (install it next to the CUDA Toolkit, or set "
                        "CUDNN_INCLUDE_DIR and CUDNN_LIBRARY; or leave STEPGRAPH_WITH_CUDA off)")
  endif()
endfunction()

# stepgraph_link_cuda(target): links the CUDA runtime and the libraries of our kernels.
function(stepgraph_link_cuda target)
  target_compile_definitions(${target} PUBLIC STEPGRAPH_WITH_CUDA)
  target_include_directories(${target} SYSTEM PRIVATE ${CUDNN_INCLUDE_DIR})
  target_link_libraries(${target} PRIVATE CUDA::cudart CUDA::cublasLt ${CUDNN_LIBRARY})
endfunction()

macro(stepgraph_enable_cuda)
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "STEPGRAPH_WITH_CUDA is ON, but no CUDA compiler was found "
                        "(put nvcc on the PATH or set CMAKE_CUDA_COMPILER; or leave STEPGRAPH_WITH_CUDA off)")
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know CUDA 13.0
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  stepgraph_find_cudnn()
endmacro()
