# Tests tools/setup --prefix: its refusals, and a prefix for this machine, against which Stepgraph is configured and
# compiled. If packages cannot be fetched, prints "cannot fetch packages" and skips that part.
cmake_minimum_required(VERSION 3.25)

set(prefix ${BUILD_DIR}/setup-test/prefix)
set(build ${BUILD_DIR}/setup-test/build)

function(expect_refusal status pattern)
  execute_process(COMMAND ${SOURCE_DIR}/tools/setup ${ARGN} RESULT_VARIABLE got ERROR_VARIABLE text OUTPUT_QUIET)
  if(NOT got EQUAL status OR NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "tools/setup ${ARGN}: exit status ${got} (not ${status}), and says: ${text}")
  endif()
endfunction()
expect_refusal(2 "unknown option '--root'" --root)
expect_refusal(2 "--prefix needs a value" --prefix)
expect_refusal(2 "for a prefix" --arch arm64)
expect_refusal(2 "unknown architecture 'riscv'" --prefix ${prefix} --arch riscv)
expect_refusal(2 "give one of them" --prefix ${prefix} --check)
expect_refusal(2 "give one of them" --prefix ${prefix} --all)
find_program(apt_get apt-get)
if(NOT apt_get)
  message("cannot fetch packages: there is no apt-get")
  return()
endif()
file(MAKE_DIRECTORY ${BUILD_DIR}/setup-test/somebody/usr)
expect_refusal(1 "is not from here" --prefix ${BUILD_DIR}/setup-test/somebody)

execute_process(COMMAND ${SOURCE_DIR}/tools/setup --prefix ${prefix} RESULT_VARIABLE got ERROR_VARIABLE text TIMEOUT 240)
if(got MATCHES "timeout")
  message("cannot fetch packages: not within 240 s")
  return()
elseif(got EQUAL 1 AND text MATCHES "is there a network|could not fetch")
  message("cannot fetch packages: ${text}")
  return()
elseif(NOT got EQUAL 0)
  message(FATAL_ERROR "tools/setup --prefix: exit status ${got}, and says: ${text}")
endif()
# The prefix may be moved: its files contain no absolute paths.
file(REMOVE_RECURSE ${prefix}-moved)
file(RENAME ${prefix} ${prefix}-moved)
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${build} -G ${GENERATOR} -C ${prefix}-moved/stepgraph.cmake
                        -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_BUILD_TYPE=Debug -DSTEPGRAPH_WITH_CUDA=OFF
                COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
file(STRINGS ${build}/CMakeCache.txt found REGEX "^(TBB|Taskflow|Catch2|CLI11|nlohmann_json)_DIR")
foreach(package TBB Taskflow Catch2 CLI11 nlohmann_json)
  if(NOT "${found}" MATCHES "${package}_DIR:PATH=${prefix}-moved/")
    message(FATAL_ERROR "${package} is not the prefix's: ${found}")
  endif()
endforeach()
execute_process(COMMAND ${CMAKE_COMMAND} --build ${build} --target engine/CMakeFiles/stepgraph_engine.dir/run/executor.cpp.o
                        engine/CMakeFiles/stepgraph_engine.dir/run/threads/helper_threads.cpp.o
                COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
file(RENAME ${prefix}-moved ${prefix})  # the next run reuses it
