#pragma once
#include <cstdint>
#include <span>
#include <string_view>

namespace stepgraph {

// Fresh weights: elements of a normal distribution around 0 with this deviation, from `first_element` on. An element
// depends only on the seed, the tensor's name and its index in the whole tensor. So every layout starts from the same
// bits. Elements are drawn in double; a float is that double, rounded. Only operations with an exact rounding rule in
// IEEE 754 are used, so all machines agree.
void fill_normal(std::uint64_t seed, std::string_view tensor, std::int64_t first_element, double deviation,
                 std::span<float> out, int threads = 1);
void fill_normal(std::uint64_t seed, std::string_view tensor, std::int64_t first_element, double deviation,
                 std::span<double> out, int threads = 1);

// Where a standard normal distribution has the share p of its mass to the left, 0 < p < 1; relative error about 1e-15
// (M. J. Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37, 1988).
[[nodiscard]] double normal_quantile(double p);

}  // namespace stepgraph
