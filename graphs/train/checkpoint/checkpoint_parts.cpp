#include "graphs/train/checkpoint/checkpoint_parts.hpp"

#include <algorithm>
#include <cstring>
#include <map>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/json_value.hpp"
#include "graphs/train/waiting_gradients.hpp"
#include "ops/tape/number.hpp"

namespace stepgraph {
namespace {

constexpr std::int64_t share_elements = 16 * 1024;  // replicas share ranges between multiples of it
constexpr std::int64_t data_alignment = 4096;

struct Range {
  std::int64_t begin = 0, end = 0;
};

// The share of a replica of [begin, end). Small ranges go to another replica for each weight.
Range share(const StoredRange& all, int replicas, int replica, std::size_t weight) {
  const std::int64_t pieces = (all.size() + share_elements - 1) / share_elements;
  const auto turn =
      static_cast<std::int64_t>((static_cast<std::size_t>(replica) + weight) % static_cast<std::size_t>(replicas));
  const auto begin = [&](std::int64_t i) {
    return all.begin + std::min(all.size(), pieces * i / replicas * share_elements);
  };
  return {begin(turn), begin(turn + 1)};
}

std::string_view safetensors_type(DType type) {
  return type == DType::f64 ? "F64" : type == DType::bf16 ? "BF16" : type == DType::f16 ? "F16" : "F32";
}

// Whole buffers of gradients that wait for their update, with their scales and factors.
void add_waiting(RankFile& file, const StepGraph& step, const StepRank& rank) {
  std::size_t number = 0;
  for (const Buffer buffer : waiting_buffers(rank)) {
    const BufferSpec& spec      = step.graph.spec(buffer);
    const std::int64_t elements = spec.size_bytes / static_cast<std::int64_t>(size_bytes(spec.type));
    SavedPart& saved            = file.parts.emplace_back();
    saved.buffer                = buffer;
    saved.name                  = str("waiting/", number, "/", spec.name);
    saved.part.tensor           = number;
    saved.part.state            = StateKind::waiting;
    saved.part.type             = spec.type;
    saved.part.size             = elements;
    saved.part.last             = elements;
    saved.piece.box.size        = elements;
    saved.piece.stride          = elements;
    ++number;
  }
}

std::string header_of(const RankFile& file) {
  JsonValue header = {{"__metadata__", {{"format", checkpoint_format_name}, {"rank", str(index(file.rank))}}}};
  std::int64_t end = 0;
  for (const SavedPart& saved : file.parts) {
    const std::int64_t begin = end;
    end += saved.part.num_bytes();
    JsonValue entry = {{"dtype", safetensors_type(saved.part.type)}};
    entry.set("shape", std::vector<std::int64_t>{saved.part.num_elements()});
    entry.set("data_offsets", std::vector<std::int64_t>{begin, end});
    header.key.push_back(saved.name);  // the names are unique: set() would compare them all
    header.items.push_back(std::move(entry));
  }
  std::string text          = json_line(header);
  const std::size_t padding = (data_alignment - (8 + text.size()) % data_alignment) % data_alignment;
  text.append(padding, ' ');
  std::string made(8, '\0');
  const std::uint64_t length = text.size();
  std::memcpy(made.data(), &length, 8);
  return made + text;
}

}  // namespace

TensorNumbers::TensorNumbers(const Model& model) {
  const ParameterInventory inventory = model.parameters();
  for (const Parameter& parameter : inventory.parameters()) {
    numbers_.emplace(parameter.name, tensors_.size());
    tensors_.push_back({.name = parameter.name, .shape = parameter.shape});
  }
}

std::vector<LocalPiece> local_pieces(const WeightSpec& weight, int tp_size, int tp_index,
                                     const TensorNumbers& numbers) {
  const TensorShape shape = local_shape(weight, tp_size, tp_index);
  std::vector<LocalPiece> made;
  for (const TpPiece& piece : tp_pieces(weight, tp_size, tp_index)) {
    if (piece.size == 0) continue;
    const TensorBox box = box_of(shape, weight.dim, piece.begin, piece.size);
    if (box.outer == 0 || box.inner == 0) continue;
    const std::int64_t local_size = shape.empty() ? 1 : shape[static_cast<std::size_t>(weight.dim)];
    made.push_back({.tensor       = numbers.at(piece.tensor),
                    .dim          = weight.dim,
                    .box          = box,
                    .at           = piece.local * box.inner,
                    .stride       = local_size * box.inner,
                    .first_holder = piece.first_holder});
  }
  return made;
}

RankFile rank_file(const StepGraph& step, Rank rank, const TensorNumbers& numbers) {
  const StepRank& held = step.ranks.at(rank);
  const int tp = step.layout.degree(Axis::tp), dp = step.layout.degree(Axis::dp);
  RankFile file{.rank = rank, .name = checkpoint_file_name(index(rank))};
  for (std::size_t number = 0; number < held.weights.size(); ++number) {
    const StepWeight& weight = held.weights[number];
    if (weight.tied || weight.first.empty()) continue;
    const WeightSpec& spec = step.spec(weight);
    // Weights follow the range of the moments: with zero1 and grad_op, values are whole on all ranks.
    const StoredRange& all = weight.first;
    const int replicas     = all.sharded ? dp / step.shard_size : dp;
    const Range mine = share(all, replicas, all.sharded ? held.coord.dp / step.shard_size : held.coord.dp, number);
    if (mine.begin >= mine.end) continue;
    const DType type             = step.value_type(spec);
    const StoredRange& values    = wide_type(type) != type ? weight.master : weight.value;
    const StoredRange* sources[] = {&values, &weight.first, &weight.second};
    for (const LocalPiece& piece : local_pieces(spec, tp, held.coord.tp, numbers)) {
      if (!piece.first_holder) continue;
      const std::int64_t first = piece.before(mine.begin), last = piece.before(mine.end);
      if (first >= last) continue;
      for (const StateKind state : all_state_kinds) {
        const StoredRange& source = *sources[static_cast<std::size_t>(state)];
        if (source.empty()) continue;  // sgd has no second moment
        SavedPart saved{.part   = {.tensor = piece.tensor,
                                   .state  = state,
                                   .type   = step.element_type(source.buffer),
                                   .dim    = piece.dim,
                                   .begin  = piece.box.begin,
                                   .size   = piece.box.size,
                                   .first  = first,
                                   .last   = last},
                        .piece  = piece,
                        .buffer = source.buffer,
                        .shift  = source.offset - source.begin};
        saved.name = str(to_string(state), "/", numbers.tensors()[piece.tensor].name, "[", piece.box.begin, ":",
                         piece.box.begin + piece.box.size, "][", first, ":", last, "]");
        file.parts.push_back(std::move(saved));
      }
    }
  }
  add_waiting(file, step, held);
  std::ranges::stable_sort(file.parts, std::ranges::greater{},
                           [](const SavedPart& saved) { return size_bytes(saved.part.type); });
  file.header    = header_of(file);
  file.num_bytes = std::ssize(file.header);
  for (SavedPart& saved : file.parts) {
    saved.part.offset = file.num_bytes;
    file.num_bytes += saved.part.num_bytes();
  }
  return file;
}

void read_part(const StoredValues& values, const SavedPart& saved, std::int64_t first, std::span<std::byte> out) {
  const auto size        = static_cast<std::int64_t>(size_bytes(saved.part.type));
  const LocalPiece& from = saved.piece;
  const auto read        = [&](std::int64_t local, std::span<std::byte> to) {
    values.read_bytes(saved.buffer, (local + saved.shift) * size, to);
  };
  std::int64_t i         = saved.part.first + first;
  const std::int64_t end = i + static_cast<std::int64_t>(out.size()) / size;
  if (from.contiguous()) return read(from.local(i), out);
  if (!values.prefers_long_ranges(saved.buffer)) {
    while (i < end) {
      const std::int64_t now = std::min(end - i, from.box.row() - i % from.box.row());
      read(from.local(i), out.first(static_cast<std::size_t>(now * size)));
      out = out.subspan(static_cast<std::size_t>(now * size));
      i += now;
    }
    return;
  }
  // The elements between the rows are read too.
  constexpr std::int64_t most = std::int64_t{4} << 20;  // elements
  std::vector<std::byte> room;
  while (i < end) {
    const std::int64_t begin = from.local(i);
    // Rows that fit, at least one.
    const std::int64_t row_end = (i / from.box.row() + 1) * from.box.row();
    const std::int64_t stop =
        std::min(end, row_end + std::max<std::int64_t>(0, most / from.stride - 1) * from.box.row());
    room.resize(static_cast<std::size_t>((from.local(stop - 1) + 1 - begin) * size));
    read(begin, room);
    while (i < stop) {
      const std::int64_t now = std::min(stop - i, from.box.row() - i % from.box.row());
      std::memcpy(out.data(), room.data() + (from.local(i) - begin) * size, static_cast<std::size_t>(now * size));
      out = out.subspan(static_cast<std::size_t>(now * size));
      i += now;
    }
  }
}

}  // namespace stepgraph
