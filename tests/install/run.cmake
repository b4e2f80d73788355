# Installs Stepgraph, moves the installation, and builds and runs the project in this folder against it. Then requests
# versions and components that do not exist, which must be refused. Called by CTest (tests/CMakeLists.txt).
cmake_minimum_required(VERSION 3.25)

set(work ${BUILD_DIR}/tests/install-work)
file(REMOVE_RECURSE ${work})

# Runs a command and sets `output` to its output. An exit code other than 0 is an error.
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "install: ${what} failed (${code}):\n${text}")
  endif()
  set(output "${text}" PARENT_SCOPE)
endfunction()

set(configure ${CMAKE_COMMAND} -G ${GENERATOR} -S ${CMAKE_CURRENT_LIST_DIR} -DCMAKE_BUILD_TYPE=${CONFIG}
              -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
string(REPLACE ";" "\\;" prefix_path "${PREFIX_PATH}")  # a list inside a list
set(found "-DCMAKE_PREFIX_PATH=${work}/moved\\;${prefix_path}" -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF)

# Configures the project with options that must be refused, for a reason that matches `why`.
function(refuse what why)
  execute_process(COMMAND ${configure} ${found} -B ${work}/refused ${ARGN}
                  RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  file(REMOVE_RECURSE ${work}/refused)
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  if(code EQUAL 0 OR NOT text MATCHES "${why}")
    message(FATAL_ERROR "install: ${what} was not refused with '${why}' (${code}):\n${text}")
  endif()
endfunction()

run("cmake --install" ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${work}/prefix --config "${CONFIG}")
file(RENAME ${work}/prefix ${work}/moved)  # no file may depend on the original place
foreach(file bin/stepgraph share/doc/stepgraph/LICENSE include/stepgraph/engine/graph/graph.hpp)
  if(NOT EXISTS ${work}/moved/${file})
    message(FATAL_ERROR "install: ${file} is not installed")
  endif()
endforeach()
file(GLOB_RECURSE package ${work}/moved/*.cmake)
foreach(file IN LISTS package)
  file(READ ${file} text)
  foreach(place ${SOURCE_DIR} ${BUILD_DIR})
    string(FIND "${text}" "${place}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "install: ${file} names ${place}, which its user does not have")
    endif()
  endforeach()
endforeach()
run("stepgraph --version" ${work}/moved/bin/stepgraph --version)

run("configuring a project that uses it" ${configure} ${found} -B ${work}/build -DCMAKE_DISABLE_FIND_PACKAGE_Taskflow=ON)
run("building it" ${CMAKE_COMMAND} --build ${work}/build --config "${CONFIG}")
foreach(program engine_only consumer)
  find_program(path_${program} ${program} PATHS ${work}/build ${work}/build/${CONFIG} NO_DEFAULT_PATH REQUIRED)
  run("running ${program}" ${path_${program}})
  message("${program}: ${output}")
endforeach()

refuse("another version" "requested version \"99.0\"" -DSTEPGRAPH_WANTED=99.0)
refuse("another minor version" "requested version \"0.0\"" -DSTEPGRAPH_WANTED=0.0)
refuse("an unknown component" "unknown component 'trainer'" -DSTEPGRAPH_PARTS=trainer)
refuse("a machine without TBB" "TBB" -DCMAKE_DISABLE_FIND_PACKAGE_TBB=ON)

# As a subdirectory: the same targets, and nothing is installed unless requested.
run("configuring it as a subdirectory" ${configure} -B ${work}/subdirectory -DSTEPGRAPH_SOURCE=${SOURCE_DIR}
    "-DCMAKE_PREFIX_PATH=${prefix_path}")
run("installing a project that has it as a subdirectory" ${CMAKE_COMMAND} --install ${work}/subdirectory
    --prefix ${work}/nothing --config "${CONFIG}")
if(EXISTS ${work}/nothing)
  message(FATAL_ERROR "install: a project that has it as a subdirectory installs it without asking")
endif()
file(REMOVE_RECURSE ${work})
