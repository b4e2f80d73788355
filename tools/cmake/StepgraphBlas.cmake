# Target stepgraph::blas, the CBLAS of matrix products. Used by the build and by the installed package. Our own
# kernels for NEON, SVE, AVX2 and AVX-512 are faster in f32, so `auto` uses CBLAS for f64 and for x86-64 without AVX2.
#
# The target is the path of a *serial* library, static if possible: the executor owns the threads, and the libblas.so.3 of
# /etc/alternatives can be any library. STEPGRAPH_BLAS_LIBRARY and STEPGRAPH_BLAS_INCLUDE_DIR name a library in another
# place; it must be serial.

# stepgraph_find_blas(blis|openblas found): defines the target; sets `found` to whether the library exists.
function(stepgraph_find_blas kind found)
  set(${found} FALSE PARENT_SCOPE)
  if(STEPGRAPH_BLAS_LIBRARY AND STEPGRAPH_BLAS_INCLUDE_DIR)
    set(library ${STEPGRAPH_BLAS_LIBRARY})
    set(include_dir ${STEPGRAPH_BLAS_INCLUDE_DIR})
  else()
    # Not cached: a package may be installed or removed between two runs.
    find_library(library NAMES lib${kind}.a ${kind} PATH_SUFFIXES ${kind}-serial NO_CACHE)
    find_path(include_dir NAMES ${kind}-serial/cblas.h NO_CACHE)
    if(NOT library MATCHES "/${kind}-serial/" OR NOT include_dir)
      return()
    endif()
    string(APPEND include_dir /${kind}-serial)
  endif()
  if(NOT EXISTS ${library} OR NOT EXISTS ${include_dir}/cblas.h)
    message(FATAL_ERROR "stepgraph: no CBLAS at '${library}' and '${include_dir}/cblas.h' (STEPGRAPH_BLAS_LIBRARY, "
                        "STEPGRAPH_BLAS_INCLUDE_DIR)")
  endif()
  add_library(stepgraph::blas UNKNOWN IMPORTED GLOBAL)
  set_target_properties(stepgraph::blas PROPERTIES IMPORTED_LOCATION ${library}
                                                   INTERFACE_INCLUDE_DIRECTORIES ${include_dir}
                                                   INTERFACE_LINK_LIBRARIES "Threads::Threads;m")
  set(${found} TRUE PARENT_SCOPE)
endfunction()

# stepgraph_choose_blas(): follows STEPGRAPH_BLAS; sets STEPGRAPH_BLAS_CHOSEN to "blis", "openblas" or "own".
function(stepgraph_choose_blas)
  set(known auto blis openblas own)
  if(NOT STEPGRAPH_BLAS IN_LIST known)
    list(JOIN known ", " known)
    message(FATAL_ERROR "STEPGRAPH_BLAS is '${STEPGRAPH_BLAS}' (known: ${known})")
  endif()
  set(found FALSE)
  if(STEPGRAPH_BLAS STREQUAL "auto" AND STEPGRAPH_SANITIZE)
    set(chosen own)  # sanitizers do not see the accesses of a library
  elseif(STEPGRAPH_BLAS STREQUAL "own")
    set(chosen own)
  else()
    set(kinds ${STEPGRAPH_BLAS})
    if(STEPGRAPH_BLAS STREQUAL "auto")
      set(kinds blis openblas)
    endif()
    foreach(kind IN LISTS kinds)
      if(NOT found)
        stepgraph_find_blas(${kind} found)
        set(chosen ${kind})
      endif()
    endforeach()
    if(NOT found AND NOT STEPGRAPH_BLAS STREQUAL "auto")
      message(FATAL_ERROR "STEPGRAPH_BLAS is ${STEPGRAPH_BLAS}, but its serial library was not found (install "
                          "lib${STEPGRAPH_BLAS}-serial-dev, set STEPGRAPH_BLAS_LIBRARY and STEPGRAPH_BLAS_INCLUDE_DIR, or "
                          "leave STEPGRAPH_BLAS at auto)")
    elseif(NOT found)
      set(chosen own)
    endif()
  endif()
  set(own_first FALSE)
  if(STEPGRAPH_BLAS STREQUAL "auto" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    set(own_first TRUE)
  endif()
  if(found)
    get_target_property(library stepgraph::blas IMPORTED_LOCATION)
    if(own_first)
      message(STATUS "Matrix products: our own kernel, in f64 ${chosen}, ${library}")
    else()
      message(STATUS "Matrix products: ${chosen}, ${library}")
    endif()
  elseif(own_first)
    message(STATUS "Matrix products: our own kernel")
  elseif(STEPGRAPH_BLAS STREQUAL "auto" AND NOT STEPGRAPH_SANITIZE)
    message(STATUS "Matrix products: our own kernel, which is slower (libblis-serial-dev or libopenblas-serial-dev would "
                   "be used)")
  else()
    message(STATUS "Matrix products: our own kernel")
  endif()
  set(STEPGRAPH_BLAS_CHOSEN ${chosen} PARENT_SCOPE)
endfunction()
