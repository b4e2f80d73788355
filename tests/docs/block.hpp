#pragma once
// What the C++ blocks of the guides can use without including it, and how they are run.
#include <algorithm>
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/loopback/world.hpp"
#include "graphs/stepgraph.hpp"

namespace stepgraph::testing {

// In a temporary folder that has the files of the guide.
void run_block(const std::string& guide, void (*block)());

// All commands of the console blocks of a guide, one after another in one such folder.
void run_commands(const std::string& guide);

// Blocks that are in this program; written by the extractor.
extern const std::size_t num_compiled_blocks;

}  // namespace stepgraph::testing
