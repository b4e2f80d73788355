#include "ops/tape/op_checks.hpp"

#include "ops/tape/streams.hpp"

namespace stepgraph {

void check_tensor(const Tape& tape, std::string_view op, std::string_view name, const Tensor& tensor) {
  (void)tape.needs_gradient(tensor);  // throws for a tensor of another tape
  if (tensor.type != tape.type()) {
    throw Error(ErrorKind::config, str(op, ": ", name, " is ", tensor.type, ", the tape computes in ", tape.type()));
  }
}

void check_same_shape(std::string_view op, std::string_view name, const TensorShape& shape,
                      const TensorShape& expected) {
  if (shape != expected) {
    throw Error(ErrorKind::config, str(op, ": ", name, " is ", to_string(shape), " (", to_string(expected), ")"));
  }
}

void check_indices(const Tape& tape, std::string_view op, std::string_view name, const Tensor& tensor,
                   std::int64_t count) {
  (void)tape.needs_gradient(tensor);
  if (tensor.type != DType::i32) {
    throw Error(ErrorKind::config, str(op, ": ", name, " are ", tensor.type, " (i32)"));
  }
  if (tensor.num_elements() != count) {
    throw Error(ErrorKind::config, str(op, ": ", tensor.num_elements(), " ", name, " for ", count, " rows"));
  }
}

void check_number(const Graph& graph, std::string_view op, std::string_view name, const Access& number, DType type) {
  const DType given        = graph.spec(number.buffer).type;
  const std::int64_t bytes = num_bytes(graph, number);
  if (given == type && bytes == static_cast<std::int64_t>(size_bytes(type))) return;
  throw Error(ErrorKind::config, str(op, ": ", name, " has ", bytes, " bytes of ", given, " (one ", type, ")"));
}

VocabShard vocab_shard(const Tape& tape, std::string_view op, std::int64_t begin, std::int64_t size) {
  const bool first = tape.tp().index == 0;
  if (begin < 0 || (first && begin > 0)) {
    throw Error(ErrorKind::config, str(op, ": vocab_begin is ", begin, " on tensor-parallel rank ", tape.tp().index,
                                       first ? " (0)" : " (0 or more)"));
  }
  return {.begin = begin, .size = size, .last = tape.tp().index + 1 == tape.tp().size};
}

std::int64_t VocabShard::find(std::string_view what, std::int32_t i, std::int64_t position) const {
  if (i < 0 || (last && i >= begin + size)) {
    throw Error(ErrorKind::run,
                str(what, " at position ", position, " is ", i, " (0 to ",
                    last ? str(begin + size - 1) : std::string("the last token of the vocabulary"), ")"));
  }
  return i >= begin && i < begin + size ? i - begin : -1;
}

}  // namespace stepgraph
