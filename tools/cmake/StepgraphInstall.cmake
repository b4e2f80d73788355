# Files of `cmake --install`, and the package for find_package(stepgraph).

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(stepgraph_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/stepgraph)
set(stepgraph_libraries engine ops graphs backends)  # also the package's components

set(stepgraph_networks "")
foreach(network IN ITEMS gloo lz4 mpi nccl uring)
  string(TOUPPER ${network} name)
  if(STEPGRAPH_HAS_${name})
    string(APPEND stepgraph_networks " ${network}")
  endif()
endforeach()

# Headers keep their paths below include/stepgraph, so their includes work unchanged.
set(targets stepgraph_all)
foreach(library IN LISTS stepgraph_libraries)
  list(APPEND targets stepgraph_${library})
endforeach()
install(TARGETS ${targets} EXPORT stepgraph
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/stepgraph)
install(EXPORT stepgraph NAMESPACE stepgraph:: FILE stepgraphTargets.cmake DESTINATION ${stepgraph_package_dir})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/stepgraphConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/package/stepgraphConfig.cmake
                              INSTALL_DESTINATION ${stepgraph_package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break compatibility.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/stepgraphConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/stepgraphConfig.cmake
              ${PROJECT_BINARY_DIR}/package/stepgraphConfigVersion.cmake
              ${CMAKE_CURRENT_LIST_DIR}/StepgraphBlas.cmake ${CMAKE_CURRENT_LIST_DIR}/StepgraphNetworks.cmake
        DESTINATION ${stepgraph_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/stepgraph)
if(TARGET stepgraph_cli)
  install(TARGETS stepgraph_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
