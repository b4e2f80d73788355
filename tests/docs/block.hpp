#pragma once
// Headers that the C++ blocks of the guides can use without including them, and the functions that run the blocks.
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
#include "backends/storage/spill_file.hpp"
#include "graphs/stepgraph.hpp"

namespace stepgraph::testing {

// Runs a block in a temporary folder that has the files of the guide.
void run_block(const std::string& guide, void (*block)());

// Runs all commands of the console blocks of a guide, in order, in one such folder.
void run_commands(const std::string& guide);

// The number of blocks in this program; written by the extractor.
extern const std::size_t num_compiled_blocks;

}  // namespace stepgraph::testing
