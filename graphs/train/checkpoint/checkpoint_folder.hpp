#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/base/error.hpp"
#include "engine/run/packed.hpp"
#include "graphs/files/checkpoint_manifest.hpp"

// Internal to graphs/train: the names in a folder of checkpoints, which process 0 changes. put_aside_checkpoint() is in
// checkpoint.hpp. Functions throw Error(backend).
namespace stepgraph {

// Whether a checkpoint is in this folder. Links are followed. False for an empty path.
[[nodiscard]] bool is_in_folder(const std::string& checkpoint, const std::string& folder);

// Whether there is a checkpoint whose files all have their sizes. Throws if the system cannot read it now.
[[nodiscard]] bool is_whole_checkpoint(const std::string& path);

// Removes temporary folders of processes that have ended, and of checkpoints that were being removed.
void remove_all_leftovers(const std::string& folder);

// Gives a temporary folder its name. A checkpoint that has this name is replaced: it is put aside only if the file
// system cannot exchange two names.
void put_in_place(const std::string& partial, const std::string& path);

// Renames all checkpoints with fewer steps, so that they are none from then on. Returns their names, to be removed. One
// that cannot be renamed stays.
[[nodiscard]] std::vector<std::string> detach_older(const std::string& folder, std::int64_t steps);

void pack(Packer& packer, const CheckpointFile& file);
void pack(Packer& packer, const std::optional<Error>& error);  // whether there is one, its kind and its text
[[nodiscard]] CheckpointFile unpack_checkpoint_file(Unpacker& received);

}  // namespace stepgraph
