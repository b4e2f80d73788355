#pragma once
#include <cstddef>

// Large blocks of host memory that are made ready by all cores. One thread sets about 5 GB/s, and pins fresh pages at
// about the same speed.
namespace stepgraph::cuda {

// Zeroed pages in memory, large ones where the system has them: so they are pinned much faster. Null: the system has
// not enough free memory, and nothing is mapped. `size` is a multiple of page_size.
inline constexpr std::size_t page_size = std::size_t{2} << 20;
[[nodiscard]] std::byte* map_pages(std::size_t size);
void unmap_pages(std::byte* pages, std::size_t size) noexcept;

void clear_pages(std::byte* bytes, std::size_t size);  // sets them to zero

}  // namespace stepgraph::cuda
