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
        CCACHE_DEPEND=1 CCACHE_IGNOREOPTIONS=-fmacro-prefix-map=* CCACHE_SLOPPINESS=pch_defines,time_macros
        ${STEPGRAPH_CCACHE})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
    # ccache makes paths relative to the build folder. (Debug information may name the clone that compiled first.)
    file(RELATIVE_PATH to_source ${CMAKE_BINARY_DIR} ${PROJECT_SOURCE_DIR})
    if(NOT to_source MATCHES "/$")
      string(APPEND to_source "/")
    endif()
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fmacro-prefix-map=${to_source}=>")
  endif()
endif()

# Many files in one object take more memory than GCC uses before it collects garbage. It does so from 1 GiB (in KiB) on: one
# object of graphs/ took 5% less time and 630 MB, not 450.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND STEPGRAPH_FILES_PER_OBJECT GREATER 1)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1048576>")
endif()

add_library(stepgraph_warnings INTERFACE)
add_library(stepgraph::warnings ALIAS stepgraph_warnings)
target_compile_options(stepgraph_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor>)
# Warnings are errors with the compiler that the tests in CI use. Others know other warnings, some of them wrong.
if(PROJECT_IS_TOP_LEVEL AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # -Wno-restrict: GCC 12 gives false warnings about std::string (GCC bug 105651).
  target_compile_options(stepgraph_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror -Wno-error=deprecated-declarations -Wno-restrict>)
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # GCC 13 and later report references to objects that outlive the call.
  target_compile_options(stepgraph_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-dangling-reference>)
endif()

add_custom_target(stepgraph_headers)  # each header compiles alone

# All libraries; stepgraph_library adds to it.
add_library(stepgraph_all INTERFACE)
add_library(stepgraph::stepgraph ALIAS stepgraph_all)
set_target_properties(stepgraph_all PROPERTIES EXPORT_NAME stepgraph)

# Build type Sanitize is Release; stepgraph_sanitize adds the instrumentation to a target. A target without it is compiled
# exactly as in a release build, so a compiler cache has its objects already.
set(CMAKE_CXX_FLAGS_SANITIZE "${CMAKE_CXX_FLAGS_RELEASE}")
if(STEPGRAPH_SANITIZE)
  add_link_options(-fsanitize=${STEPGRAPH_SANITIZE})
endif()

# stepgraph_sanitize(target LEVEL [TEST_CODE | NO_BYTES]): instruments a target and compiles it at that level of
# optimisation, with assertions and line numbers. -O0 compiles in two thirds of the time of -O1. UBSan doubles the time, so
# it looks only where it can find something that others do not:
# - not in test code: it is there to find undefined behaviour in the library;
# - null, object-size, pointer-overflow: AddressSanitizer reports the access;
# - vptr: no class is cast down;
# - alignment: only in code that makes typed pointers from bytes, not in a target with NO_BYTES.
function(stepgraph_sanitize target level)
  if(NOT STEPGRAPH_SANITIZE)
    return()
  endif()
  set(sanitizers ${STEPGRAPH_SANITIZE})
  if(ARGV2 STREQUAL "TEST_CODE")
    string(REPLACE ",undefined" "" sanitizers "${sanitizers}")
    if(sanitizers STREQUAL "address")  # heap and globals, which a test shares with the library, not its own stack
      target_compile_options(${target} PRIVATE "SHELL:--param asan-stack=0")
    endif()
  endif()
  target_compile_options(${target} PRIVATE ${level} -g1 -UNDEBUG -fsanitize=${sanitizers} -fno-omit-frame-pointer
    -fno-sanitize-recover=all
    -Wno-maybe-uninitialized -Wno-restrict)  # GCC's flow analysis warns about its own instrumentation
  if(sanitizers MATCHES "undefined")
    target_compile_options(${target} PRIVATE
      -fno-sanitize=null,object-size,pointer-overflow,vptr$<$<STREQUAL:${ARGV2},NO_BYTES>:,alignment>)
  endif()
  if(sanitizers STREQUAL "thread" AND ARGV2 STREQUAL "TEST_CODE")  # a report names the line in a test, not its callers
    target_compile_options(${target} PRIVATE "SHELL:--param tsan-instrument-func-entry-exit=0")
  endif()
  if(sanitizers MATCHES "thread")
    target_compile_definitions(${target} PRIVATE STEPGRAPH_TSAN)
  endif()
endfunction()

# stepgraph_precompile(target HEADER...): parses the standard headers, and those given, once for all sources of a target.
# Only headers of others: every source still includes what it uses of ours. Preset `dev` compiles without, and so finds a
# source that relies on it.
function(stepgraph_precompile target)
  if(NOT STEPGRAPH_PRECOMPILE)
    return()
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")  # for ccache
  set(headers algorithm array atomic bit chrono cmath cstddef cstdint cstring filesystem fstream functional iostream
              limits map memory mutex numeric optional random set span sstream string string_view utility variant vector
              ${ARGN})
  list(TRANSFORM headers REPLACE "(.+)" "$<$<COMPILE_LANGUAGE:CXX>:<\\1$<ANGLE-R>>")
  target_precompile_headers(${target} PRIVATE ${headers})
endfunction()

# For programs around the libraries.
function(stepgraph_program target)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE stepgraph::warnings)
endfunction()

# For large programs that do little work themselves, such as command lines: compiles with less optimisation.
function(stepgraph_compile_quickly target)
  target_compile_options(${target} PRIVATE -O1)
  stepgraph_libraries_first(${target})
endfunction()

# stepgraph_compile_together(target APART...): with STEPGRAPH_FILES_PER_OBJECT above 1, up to 8 sources of a target are
# compiled as one, but for those in APART: local names of theirs are names of others too, or they ask whether CUDA is in the
# build.
function(stepgraph_compile_together target)
  if(STEPGRAPH_FILES_PER_OBJECT GREATER 1)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)  # GCC takes the sources for headers
    set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  endif()
endfunction()

# Puts the libraries first on the linker's command line: of equal inline functions the linker keeps the first, so
# optimised code stays optimised. Libraries that ThreadSanitizer does not watch come last.
function(stepgraph_libraries_first target)
  set(libraries engine ops graphs backends)
  if(STEPGRAPH_SANITIZE MATCHES "thread")
    set(libraries engine_watched ops graphs_watched backends engine graphs)
  endif()
  set(archives "")
  foreach(library IN LISTS libraries)
    string(APPEND archives " $<TARGET_FILE:stepgraph_${library}>")
  endforeach()
  target_link_options(${target} PRIVATE "SHELL:-Wl,--whole-archive${archives} -Wl,--no-whole-archive")
endfunction()

# stepgraph_library(folder SOURCES ... SINGLE_THREADED ... HEADERS ... LINK ... PRIVATE_LINK ... BUILD_LINK ... SANITIZED_AT ...):
# the library of one folder. Linking it statically links PRIVATE_LINK too; BUILD_LINK is gone once the library is compiled.
# SINGLE_THREADED are sources whose code runs on one thread, on data of that thread: ThreadSanitizer would find nothing
# there. In its build they are compiled as in a release build, in the target of the same name, so that a compiler cache has
# their objects; the others are a library of their own.
# UNITY_APART: an asan build, and one with STEPGRAPH_FILES_PER_OBJECT above 1, compile the sources of a subfolder as one, but
# for these, whose local names others have too.
function(stepgraph_library folder)
  cmake_parse_arguments(arg "" "" "SANITIZED_AT;SOURCES;SINGLE_THREADED;UNITY_APART;HEADERS;LINK;PRIVATE_LINK;BUILD_LINK" ${ARGN})
  set(target stepgraph_${folder})
  set(sanitized ${target})
  set(parts ${target})
  if(STEPGRAPH_SANITIZE MATCHES "thread" AND arg_SINGLE_THREADED)
    set(sanitized ${target}_watched)
    list(APPEND parts ${sanitized})
    add_library(${target} STATIC ${arg_SINGLE_THREADED})
    add_library(${sanitized} STATIC ${arg_SOURCES})
    target_link_libraries(${sanitized} PUBLIC ${target} PRIVATE ${arg_PRIVATE_LINK} ${arg_BUILD_LINK} stepgraph::warnings)
    target_link_libraries(${target} INTERFACE ${sanitized})  # each uses the other
  else()
    add_library(${target} STATIC ${arg_SOURCES} ${arg_SINGLE_THREADED})
  endif()
  add_library(stepgraph::${folder} ALIAS ${target})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${arg_HEADERS})
  target_link_libraries(${target} PUBLIC ${arg_LINK} PRIVATE ${arg_PRIVATE_LINK})
  foreach(needed IN ITEMS stepgraph::warnings LISTS arg_BUILD_LINK)
    target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:${needed}>)
  endforeach()
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder})
  foreach(part IN LISTS parts)
    set_target_properties(${part} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  endforeach()
  if(STEPGRAPH_SANITIZE)
    stepgraph_sanitize(${sanitized} ${arg_SANITIZED_AT})  # LEVEL [NO_BYTES]
    stepgraph_precompile(${sanitized})
  endif()
  if(STEPGRAPH_UNITY AND arg_UNITY_APART AND (STEPGRAPH_SANITIZE MATCHES "address" OR STEPGRAPH_FILES_PER_OBJECT GREATER 1))
    foreach(part IN LISTS parts)
      set_target_properties(${part} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
      target_compile_options(${part} PRIVATE -Wno-subobject-linkage)  # GCC takes the sources for headers
    endforeach()
    foreach(kind IN ITEMS SOURCES SINGLE_THREADED)
      set(together ${arg_${kind}})
      list(REMOVE_ITEM together ${arg_UNITY_APART})
      foreach(source IN LISTS together)
        get_filename_component(subfolder ${source} DIRECTORY)
        string(MAKE_C_IDENTIFIER "${folder}_${subfolder}_${kind}" group)
        set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
      endforeach()
    endforeach()
  endif()
  target_link_libraries(stepgraph_all INTERFACE ${target})
  if(PROJECT_IS_TOP_LEVEL AND NOT STEPGRAPH_SANITIZE)
    stepgraph_check_headers(${folder})
  endif()
endfunction()

# stepgraph_check_headers(folder): target stepgraph_FOLDER_headers compiles each header of a folder by itself, internal ones
# too. A header that is the first include of the source with its name is proved by that source and left out: libraries are
# compiled without precompiled headers in a release build, source by source unless STEPGRAPH_FILES_PER_OBJECT is above 1.
function(stepgraph_check_headers folder)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/${folder}/*.hpp)
  set(alone "")
  foreach(header IN LISTS headers)
    if(header MATCHES "/cuda/" AND NOT STEPGRAPH_WITH_CUDA)  # without the CUDA Toolkit they do not compile
      continue()
    endif()
    if(header MATCHES "/arm/|_neon" AND NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
      continue()
    endif()
    if(header MATCHES "/x86/" AND NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
      continue()  # tests/x86 compiles sources that include it
    endif()
    string(REGEX REPLACE "hpp$" "cpp" source ${header})
    set(first "")
    if(EXISTS ${PROJECT_SOURCE_DIR}/${source})
      file(STRINGS ${PROJECT_SOURCE_DIR}/${source} first REGEX "^#include" LIMIT_COUNT 1)
    endif()
    if(NOT first STREQUAL "#include \"${header}\"")
      set(check ${PROJECT_BINARY_DIR}/headers/${header}.cpp)
      file(CONFIGURE OUTPUT ${check} CONTENT "#include \"${header}\"\n")
      list(APPEND alone ${check})
      if(header MATCHES "/x86/")
        set_source_files_properties(${check} PROPERTIES COMPILE_OPTIONS "${STEPGRAPH_AVX512_OPTIONS}")
      endif()
    endif()
  endforeach()
  add_library(stepgraph_${folder}_headers OBJECT EXCLUDE_FROM_ALL ${alone})
  target_link_libraries(stepgraph_${folder}_headers PRIVATE stepgraph::${folder})
  target_compile_options(stepgraph_${folder}_headers PRIVATE -O0)
  stepgraph_program(stepgraph_${folder}_headers)
  add_dependencies(stepgraph_headers stepgraph_${folder}_headers)
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

# Taskflow and TBB synchronise through fences and through a library that ThreadSanitizer does not see. The files that
# include them are compiled without it. Instead, their order is annotated along the graph's edges (engine/run/threads/tsan.hpp), so
# a race between node bodies is still reported and no suppression is needed. They go last in a library: of equal inline
# functions a linker keeps the first, and that one should be instrumented.
function(stepgraph_hide_from_tsan)
  if(STEPGRAPH_SANITIZE MATCHES "thread")
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=thread)
    set_property(SOURCE ${ARGN} PROPERTY SKIP_PRECOMPILE_HEADERS ON)
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

# For C++ sources that only a build with CUDA has, and those of ops/ that ask whether CUDA is in the build. Where there is
# no GPU they hardly run, so tools/test --all compiles them without optimisation.
set(STEPGRAPH_CUDA_HOST_FLAGS "" CACHE STRING "Options for C++ sources that start CUDA kernels, such as -O0")

# stepgraph_cuda_sources(folder SOURCE...): sources of a library that include headers of CUDA, as a target of their own: its
# objects go into the library. All other sources are compiled as in a build without CUDA, so a compiler cache has their
# objects; those that ask whether CUDA is in the build are given to stepgraph_with_cuda.
function(stepgraph_cuda_sources folder)
  set(library stepgraph_${folder})
  set(target ${library}_cuda)
  add_library(${target} OBJECT ${ARGN})
  stepgraph_program(${target})
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_definitions(${target} PRIVATE STEPGRAPH_WITH_CUDA)
  target_include_directories(${target} SYSTEM PRIVATE ${CUDNN_INCLUDE_DIR})
  target_link_libraries(${target} PRIVATE CUDA::cudart CUDA::cublasLt)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${STEPGRAPH_CUDA_HOST_FLAGS}>")
  stepgraph_compile_together(${target})
  target_sources(${library} PRIVATE $<TARGET_OBJECTS:${target}>)
  target_compile_definitions(${library} INTERFACE $<INSTALL_INTERFACE:STEPGRAPH_WITH_CUDA>)
  foreach(linked IN ITEMS CUDA::cudart CUDA::cublasLt ${CUDNN_LIBRARY})
    target_link_libraries(${library} PRIVATE $<LINK_ONLY:${linked}>)  # without its include folder
  endforeach()
endfunction()

# stepgraph_with_cuda(source...): they ask whether CUDA is in the build.
function(stepgraph_with_cuda)
  if(STEPGRAPH_WITH_CUDA)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_DEFINITIONS STEPGRAPH_WITH_CUDA)
  endif()
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
