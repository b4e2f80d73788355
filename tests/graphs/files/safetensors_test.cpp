#include "graphs/files/safetensors.hpp"

#include <sys/resource.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <random>

#include "engine/base/error.hpp"
#include "engine/base/half.hpp"
#include "tests/support/scale.hpp"
#include "tests/support/temp_folder.hpp"

namespace sg = stepgraph;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::Message;
using Catch::Matchers::MessageMatches;
using stepgraph::testing::data_file;
using stepgraph::testing::file_bytes;
using stepgraph::testing::TempFolder;

namespace {

std::string with_length(std::string_view header, std::string_view data, std::uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes.append(header).append(data);
}
std::string file_of(std::string_view header, std::string_view data) { return with_length(header, data, header.size()); }

template <class T>
std::vector<T> values(const sg::Safetensors& file, std::string_view name) {
  std::vector<T> out(static_cast<std::size_t>(sg::num_elements(file.info(name).shape)));
  file.read(name, std::span(out));
  return out;
}

template <class T>
sg::TensorToWrite tensor(std::string name, sg::TensorShape shape, std::vector<T> data) {
  return {.name  = std::move(name),
          .shape = std::move(shape),
          .fill  = std::function([data = std::move(data)](std::span<T> out) {
            for (std::size_t i = 0; i < out.size(); ++i) out[i] = data.at(i);
          })};
}

template <class T>
std::string raw(std::initializer_list<T> list) {
  std::string bytes(list.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), list.begin(), bytes.size());
  return bytes;
}

}  // namespace

TEST_CASE("a model saved by transformers is read", "[graphs][safetensors]") {
  const sg::Safetensors file(data_file("golden/gpt2-tiny/model.safetensors"));
  CHECK(file.names().size() == 52);
  CHECK(file.names().front() == "transformer.h.0.attn.c_attn.bias");
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
  const auto& info = file.info("transformer.h.2.attn.c_attn.weight");
  CHECK(info.shape == sg::TensorShape{64, 192});
  CHECK(info.dtype == "F32");
  CHECK(info.type == sg::DType::f32);
  // The embeddings were drawn with a standard deviation of 0.1.
  const auto wte = values<double>(file, "transformer.wte.weight");
  double squares = 0;
  for (const double x : wte) squares += x * x;
  CHECK(std::abs(std::sqrt(squares / static_cast<double>(wte.size())) - 0.1) < 0.005);
  // A part equals that part of the whole tensor.
  std::vector<double> part(70);
  file.read_part("transformer.wte.weight", 1000, std::span(part));
  CHECK(std::equal(part.begin(), part.end(), wte.begin() + 1000));
}

TEST_CASE("gradients computed by torch have the norms that it printed", "[graphs][safetensors]") {
  // From expected.json, "step0_grad_l2".
  const sg::Safetensors file(data_file("golden/gpt2-tiny/grads_step0.safetensors"));
  double squares = 0;
  for (const double x : values<double>(file, "transformer.wte.weight")) squares += x * x;
  CHECK(std::abs(std::sqrt(squares) / 0.6673352715631391 - 1) < 1e-6);
  CHECK(file.metadata().empty());
}

TEST_CASE("written tensors are read back bit for bit", "[graphs][safetensors]") {
  const TempFolder folder;
  const std::vector<float> floats   = {1.5f, -0.0f, std::numeric_limits<float>::denorm_min(), 3.25e38f, 0.1f};
  const std::vector<double> doubles = {0.1, -1e300, std::numeric_limits<double>::infinity()};
  const std::vector tensors         = {tensor("b \"quoted\"", {5}, floats), tensor("wide", {3, 1}, doubles),
                                       tensor<float>("empty", {0, 7}, {}), tensor<float>("a", {}, {7})};
  sg::write_safetensors(folder / "x.safetensors", tensors);
  const sg::Safetensors file(folder / "x.safetensors");
  CHECK(file.names() == std::vector<std::string>{"wide", "b \"quoted\"", "empty", "a"});
  CHECK(values<float>(file, "b \"quoted\"") == floats);
  CHECK(std::signbit(values<float>(file, "b \"quoted\"")[1]));
  CHECK(values<double>(file, "wide") == doubles);
  CHECK(values<float>(file, "wide")[0] == 0.1f);
  CHECK(values<double>(file, "b \"quoted\"")[4] == static_cast<double>(0.1f));
  CHECK(file.info("empty").shape == sg::TensorShape{0, 7});
  CHECK(file.info("a").shape.empty());
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);  // no temporary file is left
}

TEST_CASE("a model written again has the bytes of the file that it was read from", "[graphs][safetensors]") {
  const TempFolder folder;
  for (const char* name : {"golden/gpt2-tiny/model.safetensors", "golden/llama-tiny/grads_step0.safetensors"}) {
    const sg::Safetensors file(data_file(name));
    std::vector<sg::TensorToWrite> tensors;
    for (const auto& which : file.names())
      tensors.push_back(tensor(which, file.info(which).shape, values<float>(file, which)));
    sg::write_safetensors(folder / "again", tensors, file.metadata());
    CHECK(file_bytes(folder / "again") == file_bytes(data_file(name)));
  }
}

TEST_CASE("data begins at a multiple of 8 bytes, with as few padding spaces as possible", "[graphs][safetensors]") {
  const TempFolder folder;
  for (std::size_t length = 1; length <= 8; ++length) {
    sg::write_safetensors(folder / "x", std::vector{tensor<float>(std::string(length, 'n'), {1}, {1})});
    const std::string bytes = file_bytes(folder / "x");
    const auto spaces       = bytes.size() - 4 - (bytes.rfind('}') + 1);
    CHECK((bytes.size() - 4) % 8 == 0);
    CHECK(spaces < 8);
    CHECK(bytes.substr(bytes.size() - 4 - spaces, spaces) == std::string(spaces, ' '));
  }
}

TEST_CASE("f16 and bf16 values are read exactly", "[graphs][safetensors]") {
  const TempFolder folder;
  // In f16: 1, -2, the smallest subnormal, the largest, infinity. In bf16: 1, -2, 3.140625.
  const auto path =
      folder.put("x", file_of(R"({"h":{"dtype":"F16","shape":[5],"data_offsets":[0,10]},)"
                              R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[10,16]}})",
                              raw<std::uint16_t>({0x3c00, 0xc000, 0x0001, 0x7bff, 0x7c00, 0x3f80, 0xc000, 0x4049})));
  const sg::Safetensors file(path);
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(values<double>(file, "h") == std::vector<double>{1, -2, std::ldexp(1.0, -24), 65504, infinity});
  CHECK(values<float>(file, "b") == std::vector<float>{1, -2, 3.140625f});
  CHECK(file.info("h").type == sg::DType::f16);
  // Every bf16 value. The file is read in several pieces, and no two pieces are equal.
  const auto bits = [](std::size_t i) { return static_cast<std::uint16_t>(i + i / 65536); };
  std::string data;
  for (std::size_t i = 0; i < 5 * 65536; ++i) data += raw({bits(i)});
  const sg::Safetensors all(
      folder.put("all", file_of(R"({"w":{"dtype":"BF16","shape":[5,65536],"data_offsets":[0,655360]}})", data)));
  const auto read = values<float>(all, "w");
  bool same       = true;
  for (std::size_t i = 0; i < read.size(); ++i) {
    const auto value = static_cast<float>(sg::bf16::from_bits(bits(i)));
    same             = same && std::memcmp(&read[i], &value, 4) == 0;
  }
  CHECK(same);
}

TEST_CASE("tensors of other types are listed, but reading them is refused", "[graphs][safetensors][refuses]") {
  const TempFolder folder;
  const auto path = folder.put("x", file_of(R"({"i":{"dtype":"I16","shape":[2],"data_offsets":[0,4]},)"
                                            R"("n":{"dtype":"I64","shape":[1],"data_offsets":[4,12]},)"
                                            R"("q":{"dtype":"Q3_K","shape":[9],"data_offsets":[12,16]},)"
                                            R"("f":{"dtype":"F4","shape":[2,3],"data_offsets":[16,19]}})",
                                            std::string(19, 'x')));
  const sg::Safetensors file(path);
  CHECK(file.info("i").dtype == "I16");
  CHECK_FALSE(file.info("i").type.has_value());
  CHECK(file.info("n").type == sg::DType::i64);
  for (const auto& [name, dtype] : {std::pair{"i", "I16"}, {"n", "I64"}, {"q", "Q3_K"}, {"f", "F4"}})
    CHECK_THROWS_MATCHES(
        values<float>(file, name), sg::Error,
        Message(sg::str(path.string(), ": '", name, "' has type ", dtype, " (F64, F32, F16 or BF16)")));
}

TEST_CASE("a read that does not fit its tensor is refused", "[graphs][safetensors][refuses]") {
  const sg::Safetensors file(data_file("golden/llama-tiny/model.safetensors"));
  std::vector<float> few(63);
  const auto says = [](const char* what) { return MessageMatches(ContainsSubstring(what)); };
  CHECK_THROWS_MATCHES(file.read("model.norm.weight", std::span(few)), sg::Error,
                       says("'model.norm.weight' of shape 64 has 64 elements, but the buffer has 63"));
  CHECK_THROWS_MATCHES(file.read("model.norm", std::span(few)), sg::Error,
                       says("no tensor 'model.norm' (the file has 39 tensors)"));
  CHECK_THROWS_MATCHES(file.read_part("model.norm.weight", 2, std::span(few)), sg::Error,
                       says("has 64 elements, but 63 were requested from element 2 on"));
  CHECK_THROWS_MATCHES(file.read_part("model.norm.weight", -1, std::span(few)), sg::Error, says("from element -1 on"));
  CHECK_THROWS_MATCHES(file.read_part("model.norm.weight", std::numeric_limits<std::int64_t>::max(), std::span(few)),
                       sg::Error, says("were requested from element 9223372036854775807 on"));
}

TEST_CASE("each kind of invalid file is refused with its own message", "[graphs][safetensors][refuses]") {
  struct Lie {
    std::string bytes;
    const char* says;
  };
  const auto header = [](std::string_view text) { return file_of(text, "12345678"); };
  const auto entry  = [&](std::string_view inner) {
    return header(std::string("{\"w\":{") + std::string(inner) + "}}");
  };
  const auto typed = [&](std::string_view rest) { return entry(R"("dtype":"F32",)" + std::string(rest)); };
  const Lie lies[] = {
      {"", ": 0 bytes are too few for a safetensors file (8, then a header)"},
      {"1234567", ": 7 bytes are too few for a safetensors file (8, then a header)"},
      {with_length("{}", "", 3),
       ": the header length is 3 bytes, but only 2 bytes follow (a complete safetensors file)"},
      {with_length("{}", "", ~std::uint64_t{0}),
       ": the header length is 18446744073709551615 bytes, but only 2 bytes follow"},
      {with_length("", "", 0), ": the header does not begin with '{' (a safetensors file)"},
      {header("[1]"), ": the header does not begin with '{'"},
      {header(" {}"), ": the header does not begin with '{'"},
      {header("{"), ": header: line 1, column 2: "},
      {header("{}}"), ": header: line 1, column 3: "},
      {header("{\"\xff\": 1}"), "ill-formed UTF-8 byte"},
      {header(std::string("{\"w\":") + std::string(1000, '[')), ": header: w: nested too deep (at most 64 levels)"},
      {header(R"({"__metadata__":{},"__metadata__":{}})"), ": header: __metadata__: given twice (once)"},
      {entry(R"("shape":[2],"shape":[1])"), ": header: w.shape: given twice (once)"},
      {header(R"({"w":[]})"), ": header: 'w' is not an object ({...})"},
      {header(R"({"__metadata__":[]})"), ": header: '__metadata__' is not an object"},
      {header(R"({"__metadata__":{"step":3}})"), ": header: '__metadata__': 'step' is not a string"},
      {entry(R"("shape":[2],"data_offsets":[0,8])"), ": header: 'w' has no 'dtype' (dtype, shape and data_offsets)"},
      {typed(R"("data_offsets":[0,8])"), ": header: 'w' has no 'shape'"},
      {typed(R"("shape":[2])"), ": header: 'w' has no 'data_offsets'"},
      {entry(R"("dtype":7,"shape":[2],"data_offsets":[0,8])"), ": header: 'w': dtype is not a string (\"F32\")"},
      {typed(R"("shape":2,"data_offsets":[0,8])"), ": header: 'w': shape is not a list"},
      {typed(R"("shape":[-2],"data_offsets":[0,8])"), ": 'w': shape has an element -2 (integers from 0 to 2^63 - 1)"},
      {typed(R"("shape":[2.0],"data_offsets":[0,8])"), ": 'w': shape has an element 2.0"},
      {typed(R"("shape":["2"],"data_offsets":[0,8])"), ": 'w': shape has an element \"2\""},
      {typed(R"("shape":[18446744073709551615],"data_offsets":[0,8])"), "has an element 18446744073709551615"},
      {typed(R"("shape":[9223372036854775808],"data_offsets":[0,8])"), "has an element 9223372036854775808"},
      {typed(R"("shape":[4294967296,4294967296],"data_offsets":[0,8])"), "too many elements (fewer than 2^60)"},
      {typed(R"("shape":[0,4294967296,4294967296],"data_offsets":[0,0])"), "too many elements (fewer than 2^60)"},
      {typed(R"("shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,)"
             R"(1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,4])"),
       ": shape has 65 elements (at most 64)"},
      {typed(R"("shape":[2],"data_offsets":8)"), ": header: 'w': data_offsets is not a list"},
      {typed(R"("shape":[2],"data_offsets":[8])"), ": 'w': data_offsets has 1 elements (begin and end)"},
      {typed(R"("shape":[2],"data_offsets":[0,-8])"), ": 'w': data_offsets has an element -8"},
      {typed(R"("shape":[2],"data_offsets":[8,0])"), ": 'w': ends at byte 0, before it begins at 8"},
      {typed(R"("shape":[3],"data_offsets":[0,12])"), ": 'w': ends at byte 12, but the file has 8 bytes of data"},
      {typed(R"("shape":[3],"data_offsets":[0,8])"), ": 'w': shape 3 of F32 is 12 bytes, but data_offsets span 8"},
      {typed(R"("shape":[1],"data_offsets":[4,8])"), ": header: gap from byte 0 to 4, before 'w'"},
      {typed(R"("shape":[1],"data_offsets":[0,4])"), ": header: the tensors end at byte 4, but the file has 8 bytes"},
      {header(R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},"b":{"dtype":"U8","shape":[4],)"
              R"("data_offsets":[4,8]}})"),
       ": header: 'b' begins at byte 4, inside 'a', which ends at 5 (tensors without gaps or overlap)"},
      {header(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[4],)"
              R"("data_offsets":[4,8]}})"),
       ": header: gap from byte 3 to 4, before 'b' (tensors without gaps or overlap)"},
      {header("{}"), ": header: the tensors end at byte 0, but the file has 8 bytes of data"},
  };
  const TempFolder folder;
  for (const Lie& lie : lies) {
    CAPTURE(lie.says);
    const auto path = folder.put("lie.safetensors", lie.bytes);
    CHECK_THROWS_MATCHES(sg::Safetensors(path), sg::Error,
                         MessageMatches(ContainsSubstring(path.string()) && ContainsSubstring(lie.says)));
  }
  CHECK_THROWS_MATCHES(sg::Safetensors(folder / "none"), sg::Error,
                       Message(sg::str((folder / "none").string(), ": there is no such file")));
  CHECK_THROWS_MATCHES(sg::Safetensors(folder.path()), sg::Error,
                       Message(sg::str(folder.path().string(), ": is a folder (a file is needed)")));
  // A header that is too large is refused before it is read. The file is sparse and takes no disk space.
  const auto large = folder.put("large", with_length("{", "", 100'000'001));
  std::filesystem::resize_file(large, 200'000'000);
  CHECK_THROWS_MATCHES(sg::Safetensors(large), sg::Error,
                       MessageMatches(ContainsSubstring("the header length is 100000001 bytes (at most 100000000)")));
  // So is one that the format allows but that has no data to describe.
  const auto idle = folder.put("idle", with_length("{", "", 99'999'000));
  std::filesystem::resize_file(idle, 8 + 99'999'000 + 1'000);
  CHECK_THROWS_MATCHES(sg::Safetensors(idle), sg::Error,
                       MessageMatches(ContainsSubstring("the header length is 99999000 bytes for 1000 bytes of data (at "
                                                        "most 16777216, or as long as the data)")));
}

TEST_CASE("a randomly damaged file is read or refused, and never crashes the reader", "[graphs][safetensors][fuzz]") {
  const TempFolder folder;
  sg::write_safetensors(folder / "good",
                        std::vector{tensor<float>("a.weight", {2, 3}, {1, 2, 3, 4, 5, 6}),
                                    tensor<double>("b", {4}, {1, 2, 3, 4}), tensor<float>("c", {}, {1})});
  const std::string good = file_bytes(folder / "good");
  std::mt19937 random(11);
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  const std::string_view favourites = "0123456789-[]{}\",:.eE\\\xff\0 F";
  int read = 0, refused = 0;
  for (int trial = 0; trial < sg::testing::cases(2000); ++trial) {
    std::string bytes = good;
    const int changes = static_cast<int>(below(4));
    for (int change = 0; change < changes; ++change) {
      const std::size_t at = below(3) == 0 ? below(bytes.size()) : below(std::min<std::size_t>(bytes.size(), 240));
      const char byte      = below(2) == 0 ? favourites[below(favourites.size())] : static_cast<char>(below(256));
      if (const auto how = below(4); how == 0) {
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), byte);
      } else if (how == 1 && bytes.size() > 1) {
        bytes.erase(at, 1 + below(std::min<std::size_t>(9, bytes.size() - at)));
        if (bytes.empty()) bytes = "x";
      } else {
        bytes[at] = byte;
      }
    }
    if (below(4) == 0) bytes.resize(below(bytes.size() + 1));
    const auto path = folder.put("bad", bytes);
    try {
      const sg::Safetensors file(path);
      for (const auto& name : file.names()) {
        const auto size = sg::num_elements(file.info(name).shape);
        REQUIRE(size <= static_cast<std::int64_t>(2 * bytes.size()));  // F4: two elements per byte
        (void)values<float>(file, name);
        (void)values<double>(file, name);
      }
      ++read;
    } catch (const sg::Error& error) {
      if (!std::string_view(error.what()).starts_with(path.string())) FAIL_CHECK(error.what());
      ++refused;
    }
    std::filesystem::remove(path);  // overwriting a file would wait for the disk
  }
  CHECK(read > sg::testing::at_least(200));
  CHECK(refused > sg::testing::at_least(800));
}

TEST_CASE("a file that shrinks while it is open is an error", "[graphs][safetensors][refuses]") {
  const TempFolder folder;
  sg::write_safetensors(folder / "x", std::vector{tensor<float>("w", {4}, {1, 2, 3, 4})});
  const sg::Safetensors file(folder / "x");
  const auto size = std::filesystem::file_size(folder / "x");
  std::filesystem::resize_file(folder / "x", size - 4);
  CHECK_THROWS_MATCHES(values<float>(file, "w"), sg::Error,
                       Message(sg::str((folder / "x").string(), ": ends at byte ", size - 4,
                                       ", but 4 more are needed (it had ", size, " bytes when it was opened)")));
}

TEST_CASE("a failed write leaves the old file unchanged", "[graphs][safetensors][refuses]") {
  const TempFolder folder;
  const auto path = folder.put("x", "old");
  SECTION("the disk is full") {
    // A limit on the file size acts like a full disk, except for the reason in the message.
    rlimit before{};
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{1000, before.rlim_max};
    std::string said;
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    try {
      sg::write_safetensors(path, std::vector{tensor("w", {1000}, std::vector<float>(1000))});
    } catch (const sg::Error& error) {
      said = error.what();
      if (error.kind() != sg::ErrorKind::backend) said = "of another kind";
    }
    setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
    CHECK(said == path.string() + ": cannot be written: File too large (after 1000 bytes)");
  }
  SECTION("the function that fills a tensor throws") {
    const auto fail = std::function([](std::span<float>) { throw sg::Error(sg::ErrorKind::run, "no values"); });
    CHECK_THROWS_MATCHES(sg::write_safetensors(path, std::vector{sg::TensorToWrite{"w", {2}, fail}}), sg::Error,
                         Message("no values"));
  }
  CHECK(file_bytes(path) == "old");
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
}

TEST_CASE("tensors that cannot be written are refused", "[graphs][safetensors][refuses]") {
  const TempFolder folder;
  const auto write = [&](std::vector<sg::TensorToWrite> list) { sg::write_safetensors(folder / "x", list); };
  const auto says  = [](const char* what) { return Message(what); };
  const auto w     = tensor<float>("w", {1}, {1});
  CHECK_THROWS_MATCHES(write({w, w}), sg::Error, says("safetensors: 'w' is given twice (unique names)"));
  CHECK_THROWS_MATCHES(write({tensor<float>("__metadata__", {1}, {1})}), sg::Error,
                       says("safetensors: '__metadata__' is reserved or empty (a tensor name)"));
  CHECK_THROWS_MATCHES(write({{.name = "w", .shape = {1}}}), sg::Error,
                       says("safetensors: 'w' has no fill function (a function that writes its elements)"));
  CHECK_THROWS_MATCHES(write({tensor<float>("w", {-1}, {})}), sg::Error,
                       says("safetensors: 'w': shape -1 has a dim of -1 (0 or more)"));
  CHECK_THROWS_MATCHES(write({tensor<float>("\xff", {1}, {1})}), sg::Error,
                       MessageMatches(ContainsSubstring("is not valid UTF-8")));
  CHECK_THROWS_MATCHES(
      sg::write_safetensors(folder / "none/x", std::vector{w}), sg::Error,
      Message(sg::str((folder / "none/x").string(), ": cannot be created: No such file or directory")));
  CHECK(std::filesystem::is_empty(folder.path()));
}
