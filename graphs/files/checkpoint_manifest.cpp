#include "graphs/files/checkpoint_manifest.hpp"

#include <algorithm>
#include <set>
#include <tuple>

#include "engine/base/error.hpp"
#include "engine/base/words.hpp"
#include "graphs/files/json_value.hpp"
#include "ops/transfers/hash.hpp"

namespace stepgraph {
namespace {

constexpr std::string_view folder_prefix = "step-", file_prefix = "rank-", file_suffix = ".safetensors";

std::uint64_t hash_of(std::string_view text) { return hash_bytes(std::as_bytes(std::span(text))); }

JsonValue json_of(const std::string& text) {
  return text.empty() ? JsonValue() : parse_json(text, "checkpoint: a config");
}

JsonValue json_of(const CheckpointState& state) {
  JsonValue made = {{"steps", state.steps},
                    {"updates", state.updates},
                    {"position", state.position},
                    {"seq", state.seq},
                    {"seed", state.seed}};
  if (state.loss_scale)
    made.set("loss_scale", {{"scale", state.loss_scale->scale}, {"good_steps", state.loss_scale->good_steps}});
  if (state.waiting)
    made.set("waiting", {{"max_staleness", state.waiting->max_staleness},
                         {"sets", state.waiting->num_sets},
                         {"placement", state.waiting->placement}});
  return made;
}

JsonValue json_of(const CheckpointPart& part) {
  std::string hashes;
  for (const std::uint64_t hash : part.hashes) hashes += hash_text(hash);
  return {{"tensor", part.tensor},        {"state", to_string(part.state)},
          {"type", to_string(part.type)}, {"dim", part.dim},
          {"begin", part.begin},          {"size", part.size},
          {"first", part.first},          {"last", part.last},
          {"offset", part.offset},        {"hashes", hashes}};
}

// The text up to the hash, and the hash as it is written.
constexpr std::string_view hash_field = ",\n\"hash\": \"", end_of_text = "\"\n}\n";
constexpr std::size_t hash_digits = 16;

// --- reading ---------------------------------------------------------------------------------------------------------

class Reader {
 public:
  explicit Reader(std::string_view subject) : subject_(subject) {}

  [[noreturn]] void refuse(const std::string& why) const { throw Error(ErrorKind::config, str(subject_, ": ", why)); }

  const JsonValue& field(const JsonValue& object, std::string_view name) const {
    const JsonValue* const found = object.is_object() ? object.find(name) : nullptr;
    if (found == nullptr) refuse(str("the field '", name, "' is missing"));
    return *found;
  }
  template <class T>
  T count(const JsonValue& object, std::string_view name) const {
    const JsonValue& value        = field(object, name);
    const std::optional<T> number = value.is_number() ? to_number<T>(value.text) : std::nullopt;
    if (!number || std::cmp_less(*number, 0)) refuse(str("'", name, "' is ", excerpt(value), " (a count)"));
    return *number;
  }
  const std::string& text(const JsonValue& object, std::string_view name) const {
    const JsonValue& value = field(object, name);
    if (!value.is_string()) refuse(str("'", name, "' is ", excerpt(value), " (a text)"));
    return value.text;
  }
  const JsonValue& list(const JsonValue& object, std::string_view name) const {
    const JsonValue& value = field(object, name);
    if (!value.is_list()) refuse(str("'", name, "' is no list"));
    return value;
  }

  CheckpointState state(const JsonValue& object) const {
    CheckpointState state{.steps    = count<std::int64_t>(object, "steps"),
                          .updates  = count<std::int64_t>(object, "updates"),
                          .position = count<std::int64_t>(object, "position"),
                          .seq      = count<std::int64_t>(object, "seq"),
                          .seed     = count<std::uint64_t>(object, "seed")};
    if (const JsonValue* const scale = object.find("loss_scale"); scale != nullptr && !scale->is_null()) {
      const JsonValue& value = field(*scale, "scale");
      if (!value.is_number() || !(value.as_real() > 0)) refuse(str("the loss scale is ", excerpt(value)));
      state.loss_scale = {.scale = value.as_real(), .good_steps = count<std::int64_t>(*scale, "good_steps")};
    }
    if (const JsonValue* const waiting = object.find("waiting"); waiting != nullptr && !waiting->is_null())
      state.waiting = {.max_staleness = count<int>(*waiting, "max_staleness"),
                       .num_sets      = count<int>(*waiting, "sets"),
                       .placement     = text(*waiting, "placement")};
    return state;
  }

  CheckpointPart part(const JsonValue& object) const {
    CheckpointPart part{.tensor = count<std::size_t>(object, "tensor"),
                        .dim    = count<int>(object, "dim"),
                        .begin  = count<std::int64_t>(object, "begin"),
                        .size   = count<std::int64_t>(object, "size"),
                        .first  = count<std::int64_t>(object, "first"),
                        .last   = count<std::int64_t>(object, "last"),
                        .offset = count<std::int64_t>(object, "offset")};
    const std::string& state = text(object, "state");
    const auto kind  = std::ranges::find_if(all_state_kinds, [&](StateKind each) { return to_string(each) == state; });
    const bool waits = state == to_string(StateKind::waiting);
    if (kind == all_state_kinds.end() && !waits) refuse(str("there is no state '", state, "'"));
    part.state                = waits ? StateKind::waiting : *kind;
    const std::string& type   = text(object, "type");
    constexpr DType allowed[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
    const std::span<const DType> types(allowed, waits ? 4 : 2);
    const auto found = std::ranges::find_if(types, [&](DType each) { return to_string(each) == type; });
    if (found == types.end())
      refuse(str("a part of ", state, " has type '", type, waits ? "' (f32, f64, bf16 or f16)" : "' (f32 or f64)"));
    part.type   = *found;
    part.hashes = hashes(text(object, "hashes"));
    return part;
  }

  std::vector<std::uint64_t> hashes(const std::string& digits) const {
    std::vector<std::uint64_t> made;
    for (std::size_t i = 0; i + hash_digits <= digits.size(); i += hash_digits) {
      std::uint64_t hash       = 0;
      const char* const begin  = digits.data() + i;
      const auto [end, failed] = std::from_chars(begin, begin + hash_digits, hash, 16);
      if (failed != std::errc{} || end != begin + hash_digits) refuse("a hash is no hexadecimal number");
      made.push_back(hash);
    }
    if (digits.size() % hash_digits != 0) refuse("a list of hashes ends too early");
    return made;
  }

 private:
  std::string_view subject_;
};

}  // namespace

std::string_view to_string(StateKind state) noexcept {
  constexpr std::array<std::string_view, 4> names{"weight", "first_moment", "second_moment", "waiting"};
  return names[static_cast<std::size_t>(state)];
}

std::int64_t num_blocks(const CheckpointPart& part) noexcept {
  return (part.num_bytes() + checkpoint_block_bytes - 1) / checkpoint_block_bytes;
}

bool CheckpointManifest::has(StateKind wanted) const noexcept {
  return std::ranges::any_of(files, [&](const CheckpointFile& file) {
    return std::ranges::any_of(file.parts, [&](const CheckpointPart& part) { return part.state == wanted; });
  });
}

std::int64_t CheckpointManifest::num_bytes() const noexcept {
  std::int64_t sum = 0;
  for (const CheckpointFile& file : files) sum += file.num_bytes;
  return sum;
}

std::int64_t CheckpointManifest::num_elements() const noexcept {
  std::int64_t sum = 0;
  for (const CheckpointTensor& tensor : tensors) sum += stepgraph::num_elements(tensor.shape);
  return sum;
}

namespace {

void check_waiting_part(const CheckpointFile& file, const CheckpointPart& part, std::int64_t offset,
                        const auto& refuse) {
  if (part.first != 0 || part.last <= 0 || part.offset != offset || part.offset > file.num_bytes ||
      part.num_bytes() > file.num_bytes - part.offset || std::ssize(part.hashes) != num_blocks(part))
    refuse(str(file.name, ": the gradients that wait for their update do not fit their place"));
}

}  // namespace

void check_coverage(const CheckpointManifest& manifest, std::string_view subject) {
  const auto refuse = [&](const std::string& why) { throw Error(ErrorKind::config, str(subject, ": ", why)); };
  std::set<std::string_view> names;
  for (const CheckpointTensor& tensor : manifest.tensors) {
    check_shape(tensor.shape, str(subject, ": '", tensor.name, "'"));
    if (!names.insert(tensor.name).second) refuse(str("tensor '", tensor.name, "' is there twice"));
  }
  // Ranges of a tensor and state: of the dim, and in the order of their piece.
  using Place = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;  // begin, size, first, last
  std::map<std::pair<std::size_t, StateKind>, std::vector<Place>> places;
  std::map<std::pair<std::size_t, StateKind>, int> dims;
  std::set<StateKind> states;
  std::set<std::string_view> file_names;
  for (const CheckpointFile& file : manifest.files) {
    if (file.name.empty() || file.name.find('/') != file.name.npos || !file_names.insert(file.name).second)
      refuse(str("'", file.name, "' is no file name, or is there twice"));
    std::int64_t end = file.header_bytes;
    for (const CheckpointPart& part : file.parts) {
      if (part.state == StateKind::waiting) {
        check_waiting_part(file, part, end, refuse);
        end = part.offset + part.num_bytes();
        continue;
      }
      if (part.tensor >= manifest.tensors.size()) refuse(str(file.name, ": a part of a tensor that is not there"));
      const CheckpointTensor& tensor = manifest.tensors[part.tensor];
      const std::int64_t all         = num_elements(tensor.shape);
      const auto dim                 = static_cast<std::size_t>(part.dim);
      // A scalar is one element of one dim.
      const std::int64_t dim_size = tensor.shape.empty() ? 1 : dim < tensor.shape.size() ? tensor.shape[dim] : 0;
      if (dim_size == 0 || part.size == 0 || part.begin > dim_size || part.size > dim_size - part.begin ||
          part.first >= part.last || part.last > all / dim_size * part.size)
        refuse(str(file.name, ": a part of '", tensor.name, "' has elements that the tensor does not have"));
      if (part.offset != end || part.offset > file.num_bytes || part.num_bytes() > file.num_bytes - part.offset)
        refuse(str(file.name, ": a part of '", tensor.name, "' does not follow the one before it, or leaves the file"));
      if (std::ssize(part.hashes) != num_blocks(part))
        refuse(str(file.name, ": a part of '", tensor.name, "' has ", part.hashes.size(), " hashes, not ",
                   num_blocks(part)));
      end                   = part.offset + part.num_bytes();
      const auto subject_of = std::pair(part.tensor, part.state);
      if (!dims.emplace(subject_of, part.dim).second && dims[subject_of] != part.dim)
        refuse(str("the parts of '", tensor.name, "' are cut along different dims"));
      places[subject_of].emplace_back(part.begin, part.size, part.first, part.last);
      states.insert(part.state);
    }
    if (end != file.num_bytes) refuse(str(file.name, ": its parts end at byte ", end, " of ", file.num_bytes));
  }
  states.insert(StateKind::weight);
  for (const StateKind state : states) {
    for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
      const CheckpointTensor& tensor = manifest.tensors[i];
      const std::int64_t all         = num_elements(tensor.shape);
      if (all == 0) continue;
      std::vector<Place>& found = places[{i, state}];
      std::ranges::sort(found);
      const int dim               = found.empty() ? 0 : dims[{i, state}];
      const std::int64_t dim_size = tensor.shape.empty() ? 1 : tensor.shape[static_cast<std::size_t>(dim)];
      const auto fail             = [&](std::string_view what) {
        refuse(str("the parts of ", to_string(state), " '", tensor.name, "' ", what));
      };
      std::int64_t covered = 0;  // indices of the dim
      for (std::size_t at = 0; at < found.size();) {
        const auto [begin, size, first, last] = found[at];
        if (begin != covered) fail(begin < covered ? "overlap" : "leave a gap");
        std::int64_t done = 0;  // elements of the piece
        for (; at < found.size() && std::get<0>(found[at]) == begin; ++at) {
          const auto [begin_here, size_here, first_here, last_here] = found[at];
          if (size_here != size || first_here < done) fail("overlap");
          if (first_here > done) fail("leave a gap");
          done = last_here;
        }
        if (done != all / dim_size * size) fail("leave a gap");
        covered = begin + size;
      }
      if (covered != dim_size) fail(found.empty() ? "are missing" : "leave a gap");
    }
  }
}

std::string to_json(const CheckpointManifest& manifest) {
  JsonValue tensors = JsonValue::list();
  for (const CheckpointTensor& tensor : manifest.tensors)
    tensors.items.push_back({{"name", tensor.name}, {"shape", tensor.shape}});
  std::string text = "{";
  const auto add   = [&](std::string_view name, const std::string& value) {
    text += str(text.size() == 1 ? "\n" : ",\n", "\"", name, "\": ", value);
  };
  add("format", json_line(JsonValue(checkpoint_format_name)));
  add("version", str(manifest.state.waiting ? checkpoint_format : 1));
  add("state", json_line(json_of(manifest.state)));
  add("optimizer", json_line(JsonValue(manifest.optimizer)));
  add("config", json_line(json_of(manifest.state.config)));
  add("model", json_line(json_of(manifest.model_config)));
  add("block_bytes", str(checkpoint_block_bytes));
  add("tensors", json_line(tensors));
  add("files", str("[\n",
                   join_text(manifest.files, ",\n",
                             [](const CheckpointFile& file) {
                               JsonValue parts = JsonValue::list();
                               for (const CheckpointPart& part : file.parts) parts.items.push_back(json_of(part));
                               return json_line({{"name", file.name},
                                                 {"bytes", file.num_bytes},
                                                 {"header_bytes", file.header_bytes},
                                                 {"header_hash", hash_text(file.header_hash)},
                                                 {"parts", parts}});
                             }),
                   "]"));
  const std::string hash = hash_text(hash_of(text));
  return str(text, hash_field, hash, end_of_text);
}

CheckpointManifest parse_checkpoint_manifest(std::string_view text, std::string_view subject) {
  const Reader reader(subject);
  JsonValue value;
  try {
    value = parse_json(text);
  } catch (const Error& error) {
    reader.refuse(str("is damaged, or no manifest of a checkpoint: ", error.what()));
  }
  const JsonValue* const format = value.is_object() ? value.find("format") : nullptr;
  if (format == nullptr || !format->is_string() || format->text != checkpoint_format_name)
    reader.refuse(str("is not the manifest of a checkpoint (\"format\": \"", checkpoint_format_name, "\")"));
  const auto version = reader.count<int>(value, "version");
  if (version > checkpoint_format)
    reader.refuse(str("has format ", version, ", which is newer than this program (", checkpoint_format, ")"));
  if (version < 1) reader.refuse(str("has format ", version, " (", checkpoint_format, ")"));
  const std::size_t tail = hash_field.size() + hash_digits + end_of_text.size();
  if (text.size() < tail) reader.refuse("is damaged: it is too short");
  const std::string_view body = text.substr(0, text.size() - tail);
  if (text.substr(body.size()) != str(hash_field, hash_text(hash_of(body)), end_of_text))
    reader.refuse("is damaged: its hash does not match its text");
  if (reader.count<std::int64_t>(value, "block_bytes") != checkpoint_block_bytes)
    reader.refuse(str("has hashes of blocks of another size (", checkpoint_block_bytes, " bytes)"));
  CheckpointManifest made{.state     = reader.state(reader.field(value, "state")),
                          .optimizer = reader.text(value, "optimizer")};
  if (const JsonValue& config = reader.field(value, "config"); !config.is_null()) made.state.config = json_line(config);
  if (const JsonValue& model = reader.field(value, "model"); !model.is_null()) made.model_config = json_document(model);
  for (const JsonValue& each : reader.list(value, "tensors").items) {
    CheckpointTensor tensor{.name = reader.text(each, "name")};
    for (const JsonValue& size : reader.list(each, "shape").items) {
      const auto number = size.is_number() ? to_number<std::int64_t>(size.text) : std::nullopt;
      if (!number) reader.refuse(str("'", tensor.name, "' has a size ", excerpt(size)));
      tensor.shape.push_back(*number);
    }
    made.tensors.push_back(std::move(tensor));
  }
  for (const JsonValue& each : reader.list(value, "files").items) {
    CheckpointFile file{.name = reader.text(each, "name"), .num_bytes = reader.count<std::int64_t>(each, "bytes")};
    file.header_bytes        = reader.count<std::int64_t>(each, "header_bytes");
    const auto header_hashes = reader.hashes(reader.text(each, "header_hash"));
    if (header_hashes.size() != 1) reader.refuse("a header has another number of hashes than one");
    file.header_hash = header_hashes[0];
    for (const JsonValue& part : reader.list(each, "parts").items) file.parts.push_back(reader.part(part));
    made.files.push_back(std::move(file));
  }
  check_coverage(made, subject);
  return made;
}

std::string with_zeros(std::int64_t number, std::size_t digits) {
  const std::string text = str(number);
  return text.size() < digits ? std::string(digits - text.size(), '0') + text : text;
}

std::string checkpoint_folder_name(std::int64_t steps) { return str(folder_prefix, with_zeros(steps, 9)); }

std::optional<std::int64_t> steps_of_checkpoint(std::string_view folder_name) {
  if (!folder_name.starts_with(folder_prefix)) return std::nullopt;
  const auto steps = to_number<std::int64_t>(folder_name.substr(folder_prefix.size()));
  return steps && *steps >= 0 && checkpoint_folder_name(*steps) == folder_name ? steps : std::nullopt;
}

std::string checkpoint_file_name(int rank) { return str(file_prefix, with_zeros(rank, 5), file_suffix); }

}  // namespace stepgraph
