# Targets stepgraph::gloo, stepgraph::mpi and stepgraph::nccl, the libraries of process worlds, stepgraph::lz4, and
# stepgraph::uring, that of files on disk. Used by the build and by the installed package.

# stepgraph_find_network(found name header hints...): defines the target stepgraph::name of a library of that name; sets
# `found` to whether it exists. Gloo's own package file has an absolute path, so it is of no use in a prefix.
function(stepgraph_find_network found name header)
  set(${found} FALSE PARENT_SCOPE)
  # Not cached: a package may be installed or removed between two runs.
  find_library(library NAMES ${name} HINTS ${ARGN} NO_CACHE)
  find_path(include_dir NAMES ${header} HINTS ${ARGN} NO_CACHE)
  if(NOT library OR NOT include_dir)
    return()
  endif()
  if(NOT TARGET stepgraph::${name})
    add_library(stepgraph::${name} UNKNOWN IMPORTED GLOBAL)
    set_target_properties(stepgraph::${name} PROPERTIES IMPORTED_LOCATION ${library}
                                                        INTERFACE_INCLUDE_DIRECTORIES ${include_dir}
                                                        INTERFACE_LINK_LIBRARIES Threads::Threads)
  endif()
  set(${found} TRUE PARENT_SCOPE)
endfunction()

# The same for each library: stepgraph_find_NAME(found). NCCL is beside the CUDA Toolkit, or in the system.
macro(stepgraph_find_gloo found)
  stepgraph_find_network(${found} gloo gloo/transport/tcp/device.h)
endmacro()
macro(stepgraph_find_lz4 found)
  stepgraph_find_network(${found} lz4 lz4.h)
endmacro()
macro(stepgraph_find_uring found)
  stepgraph_find_network(${found} uring liburing.h)
endmacro()
macro(stepgraph_find_nccl found)
  stepgraph_find_network(${found} nccl nccl.h ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_INCLUDE_DIRS})
endmacro()

# stepgraph_find_mpi(found): the same for MPI, whose C interface is used. A macro: find_package sets variables.
macro(stepgraph_find_mpi found)
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI QUIET COMPONENTS CXX)
  set(${found} ${MPI_CXX_FOUND})
  if(MPI_CXX_FOUND AND NOT TARGET stepgraph::mpi)
    add_library(stepgraph::mpi INTERFACE IMPORTED GLOBAL)
    target_link_libraries(stepgraph::mpi INTERFACE MPI::MPI_CXX)
  endif()
endmacro()

# stepgraph_choose_network(NAME package [what]): follows STEPGRAPH_WITH_NAME, which is AUTO, ON or OFF, and sets
# STEPGRAPH_HAS_NAME in the caller. `what` is its name in messages; "Backend" if it is not given.
macro(stepgraph_choose_network name package)
  set(stepgraph_what ${ARGN})
  if(NOT stepgraph_what)
    set(stepgraph_what Backend)
  endif()
  string(TOUPPER "${STEPGRAPH_WITH_${name}}" stepgraph_wanted)
  set(STEPGRAPH_HAS_${name} OFF)
  string(TOLOWER ${name} stepgraph_network)
  if(NOT stepgraph_wanted MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|YES|NO|1|0)$")
    message(FATAL_ERROR "STEPGRAPH_WITH_${name} is '${STEPGRAPH_WITH_${name}}' (AUTO, ON or OFF)")
  elseif(stepgraph_wanted STREQUAL "AUTO" OR stepgraph_wanted)
    cmake_language(CALL stepgraph_find_${stepgraph_network} stepgraph_found)
    if(stepgraph_found)
      set(STEPGRAPH_HAS_${name} ON)
      message(STATUS "${stepgraph_what} ${stepgraph_network}: yes")
    elseif(stepgraph_wanted STREQUAL "AUTO")
      message(STATUS "${stepgraph_what} ${stepgraph_network}: left out, because its library was not found (install ${package})")
    else()
      message(FATAL_ERROR "STEPGRAPH_WITH_${name} is ${STEPGRAPH_WITH_${name}}, but the library was not found (install "
                          "${package}, or leave STEPGRAPH_WITH_${name} at AUTO)")
    endif()
  endif()
endmacro()
