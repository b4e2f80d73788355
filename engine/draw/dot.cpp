#include "engine/draw/dot.hpp"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <ostream>
#include <sstream>
#include <string_view>

#include "engine/base/error.hpp"
#include "engine/base/output_file.hpp"
#include "engine/base/text.hpp"
#include "engine/draw/groups.hpp"
#include "engine/draw/layout.hpp"

extern char** environ;

namespace stepgraph {
namespace drawing {
namespace {

constexpr double margin = 8;

// Paul Tol's "light" scheme: fills that colour-blind readers and printers can distinguish, under dark text. `line` is a
// darker line colour of the same hue.
struct Paint {
  const char *fill, *line;
};
Paint paint(Shade shade) {
  static constexpr std::array<Paint, num_shades> paints = {{{"#A3C6EA", "#3B6EA8"},
                                                            {"#DDDDDD", "#777777"},
                                                            {"#F3E7A9", "#9A8420"},
                                                            {"#7FD1B9", "#1E8468"},
                                                            {"#F4A88F", "#C2502B"},
                                                            {"#FFC3CE", "#C94F6D"},
                                                            {"#F7C99B", "#B8651B"},
                                                            {"#BDEAFF", "#2B8DB8"},
                                                            {"#C4E4F2", "#4F8CA6"},
                                                            {"#A6DFA2", "#2E7D32"},
                                                            {"#E6C4F0", "#8E44AD"},
                                                            {"#E5D3B3", "#8A6A2F"},
                                                            {"#FFFFFF", "#555555"},
                                                            {"#D3DD7C", "#7C8A12"},
                                                            {"#C6C65C", "#7A7A00"},
                                                            {"#C9B8DE", "#6E4E9A"}}};
  return paints[static_cast<std::size_t>(shade)];
}

// --- text ---------------------------------------------------------------------------------------------------------

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

// --- the file -----------------------------------------------------------------------------------------------------

class Writer {
 public:
  Writer(const Drawing& drawing, const Placement& placement, const DotOptions& options, std::ostream& out)
      : drawing_(drawing), placement_(placement), options_(options), out_(out) {}

  void write() {
    const double below = lay_out_legend();
    top_               = options_.title.empty() ? 0 : 26;
    width_             = std::max(placement_.width, legend_width_);
    height_            = top_ + placement_.height + below;
    out_ << "digraph stepgraph {\n"
         << "  layout=nop2;  // every place is given; without this line Graphviz places the nodes itself\n"
         << "  rankdir=LR; outputorder=edgesfirst; bgcolor=white; pad=" << number(margin / 72) << "; bb=\"0,0,"
         << number(width_) << ',' << number(height_) << "\";\n"
         << "  fontname=\"Helvetica\"; fontcolor=\"#333333\";\n"
         << "  node [shape=box, style=filled, fixedsize=true, fontname=\"Helvetica\", fontsize=" << title_font
         << ", fontcolor=\"#1a1a1a\", penwidth=0.8];\n"
         << "  edge [fontname=\"Helvetica\", arrowsize=0.6, color=\"#333333\"];\n";
    if (!options_.title.empty()) text("title", options_.title, 16, {width_ / 2, -top_ + 8}, 0.5);
    for (const ClusterArea& area : placement_.clusters) write(area);
    for (std::size_t i = 0; i < drawing_.links.size(); ++i) write(drawing_.links[i], placement_.lines[i]);
    write_legend();
    out_ << "}\n";
  }

 private:
  [[nodiscard]] std::string at(Point point) const {
    return str(number(point.x), ',', number(height_ - top_ - point.y));
  }
  [[nodiscard]] std::string bounds(const Rect& rect) const {
    return str('"', at({rect.left, rect.bottom}), ',', at({rect.right, rect.top}), '"');
  }

  void text(std::string_view id, std::string_view words, double font, Point left, double anchor = 0) {
    const double width = text_width(words, font) + 4;
    out_ << "  " << id << " [shape=plaintext, style=\"\", label=\"" << escaped(words) << "\", fontsize=" << font
         << ", fontcolor=\"#333333\", width=" << number(width / 72 + 0.05) << ", height=0.2, pos=\""
         << at({left.x + width * (0.5 - anchor), left.y}) << "\"];\n";
  }

  void write(const ClusterArea& area) {
    const Cluster& cluster = drawing_.clusters[static_cast<std::size_t>(area.cluster)];
    const bool one         = cluster.first_rank == cluster.last_rank;
    std::string id         = str("cluster_rank", cluster.first_rank);
    std::string label =
        one ? str("rank ", cluster.first_rank) : str("ranks ", cluster.first_rank, "-", cluster.last_rank);
    if (!one) id += str("_", cluster.last_rank);
    if (cluster.stage >= 0) label += str(", stage ", cluster.stage);
    if (area.band > 0) {
      id += str("_band", area.band);
      label += " (continued)";
    }
    const auto open = [&](const std::string& name, const std::string& words, double font, const Rect& rect,
                          Point middle_left, const char* style) {
      out_ << "  subgraph " << name << " {\n    label=\"" << words << "\"; fontsize=" << font << "; " << style
           << " bb=" << bounds(rect) << "; lp=\"" << at({middle_left.x + text_width(words, font) / 2, middle_left.y})
           << "\";\n";
    };
    open(id, label, rank_font, area.rect, {area.rect.left + 7, area.rect.top + rank_font * 0.5 + 5},
         "style=filled; fillcolor=white; color=\"#8c8c8c\"; penwidth=0.9;");
    for (const LaneArea& lane : area.lanes) {
      if (lane.lane >= 0) {
        const std::string name(to_string(static_cast<LaneKind>(lane.lane)));
        open(str(id, "_", name), name, lane_font, lane.rect, lane.label,
             "style=filled; fillcolor=\"#F3F3F3\"; color=\"#E2E2E2\"; penwidth=0.6;");
      }
      for (const std::uint32_t box : lane.boxes) write(box);
      if (lane.lane >= 0) out_ << "  }\n";
    }
    out_ << "  }\n";
  }

  // One colour, or stripes in proportion if the box holds nodes of several kinds.
  static std::string fill(const Box& box) {
    std::string colours;
    int used = 0;
    for (std::size_t i = 0; i < num_shades; ++i) {
      if (box.shades[i] == 0) continue;
      char share[24];
      std::snprintf(share, sizeof share, ";%.3f", static_cast<double>(box.shades[i]) / box.num_nodes);
      colours += str(used++ > 0 ? ":" : "", paint(static_cast<Shade>(i)).fill, share);
    }
    if (used == 1) return str("fillcolor=\"", colours.substr(0, colours.find(';')), '"');
    return str("style=striped, fillcolor=\"", colours, '"');
  }

  void write(std::uint32_t id) {
    const Box& box   = drawing_.boxes[id];
    const Rect& rect = placement_.boxes[id];
    const auto main  = std::max_element(box.shades.begin(), box.shades.end()) - box.shades.begin();
    out_ << "    b" << id << " [label=<";
    for (const std::string& line : box.title) out_ << (&line == &box.title.front() ? "" : "<BR/>") << escaped(line);
    if (!box.facts.empty()) out_ << "<FONT POINT-SIZE=\"" << fact_font << "\" COLOR=\"#3d3d3d\">";
    for (const std::string& line : box.facts) out_ << "<BR/>" << escaped(line);
    if (!box.facts.empty()) out_ << "</FONT>";
    out_ << ">, " << fill(box) << ", color=\"" << paint(static_cast<Shade>(main)).line << "\", tooltip=\""
         << escaped(box.tooltip) << "\", width=" << inches(rect.width()) << ", height=" << inches(rect.height())
         << ", pos=\"" << at(rect.center()) << "\"];\n";
  }

  static std::string inches(double points) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", points / 72);
    return text;
  }

  void write(const Link& link, const std::vector<Point>& line) {
    const double pen = std::min(3.0, 0.9 + 0.35 * std::log2(static_cast<double>(link.count)));
    out_ << "  b" << link.from << " -> b" << link.to << " [";
    edge_style(link.kind, link.shade, link.both, pen);
    if (link.count > 1) out_ << ", tooltip=\"" << link.count << " edges\"";
    const bool head = link.kind != LinkKind::match || link.shade == Shade::send;
    out_ << ", pos=\"" << spline(line, head, link.both) << "\"];\n";
  }

  void edge_style(LinkKind kind, Shade shade, bool both, double pen) {
    switch (kind) {
      case LinkKind::data:
        out_ << "penwidth=" << number(pen);
        break;
      case LinkKind::lane:
        out_ << "color=\"#A6A6A6\", penwidth=" << number(pen * 0.8);
        break;
      case LinkKind::loop:
        out_ << "style=dashed, constraint=false, color=\"#A0A0A0\", penwidth=" << number(pen * 0.7);
        break;
      case LinkKind::reuse:
        out_ << "style=dashed, color=\"#C0504D\", penwidth=" << number(pen * 0.8);
        break;
      case LinkKind::issue:
        out_ << "style=dashed, color=\"#4F81BD\", penwidth=" << number(pen * 0.8);
        break;
      case LinkKind::added:
        out_ << "style=dashed, penwidth=" << number(pen * 0.8);
        break;
      case LinkKind::match:
        out_ << "style=dotted, constraint=false, color=\"" << paint(shade).line << "\", penwidth=" << number(pen + 0.3);
        if (shade != Shade::send) out_ << ", dir=none";
        break;
    }
    if (both) out_ << ", dir=both";
  }

  // Rounds the corners. Graphviz takes cubic Bezier curves and separate tips for arrow heads.
  std::string spline(std::vector<Point> line, bool head, bool tail) const {
    constexpr double arrow = 6, radius = 5;
    std::string out;
    const auto shorten = [&](Point& tip, const Point& next, const char* what) {
      out += str(what, ",", at(tip), " ");
      const double length = std::max(std::hypot(next.x - tip.x, next.y - tip.y), 0.1);
      const double part   = std::min(arrow, length * 0.4) / length;
      tip                 = {tip.x + (next.x - tip.x) * part, tip.y + (next.y - tip.y) * part};
    };
    if (tail) shorten(line.front(), line[1], "s");
    if (head) shorten(line.back(), line[line.size() - 2], "e");
    const auto towards = [](Point a, Point b, double distance) {
      const double length = std::max(std::hypot(b.x - a.x, b.y - a.y), 1e-9);
      const double part   = std::min(0.5, distance / length);
      return Point{a.x + (b.x - a.x) * part, a.y + (b.y - a.y) * part};
    };
    Point last = line.front();
    out += at(last);
    const auto straight = [&](Point to) {
      out += str(" ", at({(2 * last.x + to.x) / 3, (2 * last.y + to.y) / 3}), " ",
                 at({(last.x + 2 * to.x) / 3, (last.y + 2 * to.y) / 3}), " ", at(to));
      last = to;
    };
    for (std::size_t i = 1; i + 1 < line.size(); ++i) {
      straight(towards(line[i], line[i - 1], radius));
      const Point after = towards(line[i], line[i + 1], radius);
      out += str(" ", at({(last.x + 2 * line[i].x) / 3, (last.y + 2 * line[i].y) / 3}), " ",
                 at({(after.x + 2 * line[i].x) / 3, (after.y + 2 * line[i].y) / 3}), " ", at(after));
      last = after;
    }
    straight(line.back());
    return out;
  }

  // --- legend: colours, lines and omissions ------------------------------------------------------------------------
  struct Entry {
    bool is_line;
    Shade shade;
    LinkKind kind;
    std::string_view words;
    Point place;
  };

  // Lays out rows below the picture and returns their height.
  double lay_out_legend() {
    std::array<bool, num_shades> shades{};
    std::array<bool, num_link_kinds> kinds{};
    for (const Box& box : drawing_.boxes) {
      for (std::size_t i = 0; i < num_shades; ++i) shades[i] |= box.shades[i] > 0;
    }
    for (const Link& link : drawing_.links) kinds[static_cast<std::size_t>(link.kind)] = true;
    for (std::size_t i = 0; i < num_shades; ++i) {
      if (shades[i]) legend_.push_back({false, static_cast<Shade>(i), {}, to_string(static_cast<Shade>(i)), {}});
    }
    static constexpr std::array<std::string_view, num_link_kinds> meanings = {
        "data", "lane order only", "into the next run", "one communication", "reuses memory", "issued before", "added"};
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      if (kinds[i]) legend_.push_back({true, Shade::all_reduce, static_cast<LinkKind>(i), meanings[i], {}});
    }
    const double room = std::max(placement_.width, 420.0);
    Point next{0, placement_.height + 20};
    for (Entry& entry : legend_) {
      const double width = (entry.is_line ? 30 : 16) + text_width(entry.words, 9) + 14;
      if (next.x > 0 && next.x + width > room) next = {0, next.y + 16};
      entry.place = next;
      next.x += width;
      legend_width_ = std::max(legend_width_, next.x);
    }
    caption_at_   = {0, legend_.empty() ? next.y : next.y + 17};
    legend_width_ = std::max(legend_width_, text_width(drawing_.caption, 9) + 6);
    return caption_at_.y - placement_.height + 10;
  }

  void write_legend() {
    int id = 0;
    for (const Entry& entry : legend_) {
      const Point p          = entry.place;
      const std::string name = str("legend", id++);
      if (entry.is_line) {
        text(name, entry.words, 9, {p.x + 28, p.y});
        out_ << "  " << name << "_line [shape=point, style=invis, width=0.01, height=0.01, label=\"\", pos=\"" << at(p)
             << "\"];\n  " << name << "_line -> " << name << " [";
        edge_style(entry.kind, entry.shade, false, 1);
        out_ << ", pos=\"" << spline({{p.x, p.y}, {p.x + 24, p.y}}, entry.kind != LinkKind::match, false) << "\"];\n";
      } else {
        // The text is the swatch's external label, so that an entry is one node. Graphviz puts external labels at the
        // given place.
        out_ << "  " << name << " [label=\"\", xlabel=\"" << entry.words << "\", fontsize=9, xlp=\""
             << at({p.x + 16 + text_width(entry.words, 9) / 2, p.y}) << "\", fillcolor=\"" << paint(entry.shade).fill
             << "\", color=\"" << paint(entry.shade).line << "\", width=0.167, height=0.139, pos=\""
             << at({p.x + 6, p.y}) << "\"];\n";
      }
    }
    text("caption", drawing_.caption, 9, caption_at_);
  }

  const Drawing& drawing_;
  const Placement& placement_;
  const DotOptions& options_;
  std::ostream& out_;
  std::vector<Entry> legend_;
  Point caption_at_;
  double legend_width_ = 0, top_ = 0, width_ = 0, height_ = 0;
};

}  // namespace
}  // namespace drawing

namespace {

using Scratch = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

// A file without a name.
Scratch scratch_file() {
  Scratch file(std::tmpfile(), std::fclose);
  if (!file) throw Error(ErrorKind::backend, str("svg: cannot make a temporary file: ", std::strerror(errno)));
  return file;
}

// Runs `dot` on open files: names would reach it as options if they began with '-'.
int run_dot(int from, int to, int says) {
  char program[] = "dot", format[] = "-Tsvg";
  char* const argv[] = {program, format, nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, from, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, to, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, says, STDERR_FILENO);
  pid_t child     = 0;
  const int error = ::posix_spawnp(&child, program, &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    throw Error(ErrorKind::backend, str("svg: cannot run Graphviz's 'dot': ", std::strerror(error),
                                        " (install Graphviz, as in 'apt install graphviz', and have dot on the PATH)"));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

std::string_view to_string(Detail detail) noexcept {
  switch (detail) {
    case Detail::stage:
      return "stage";
    case Detail::layer:
      return "layer";
    case Detail::op:
      return "op";
  }
  return "";
}

void write_dot(const OrderedGraph& graph, std::ostream& out, const DotOptions& options) {
  const drawing::Drawing drawing     = drawing::group(graph, options);
  const drawing::Placement placement = drawing::place(drawing);
  drawing::Writer(drawing, placement, options, out).write();
}

void write_dot(const OrderedGraph& graph, const std::string& path, const DotOptions& options) {
  write_stream(path, [&](std::ostream& out) { write_dot(graph, out, options); });
}

void write_svg(const OrderedGraph& graph, const std::string& path, const DotOptions& options) {
  std::ostringstream text;
  write_dot(graph, text, options);
  const std::string dot = std::move(text).str();
  OutputFile svg(path);
  const Scratch from = scratch_file(), says = scratch_file();
  if (std::fwrite(dot.data(), 1, dot.size(), from.get()) != dot.size() || std::fflush(from.get()) != 0)
    throw Error(ErrorKind::backend, str("svg: a temporary file cannot be written: ", std::strerror(errno)));
  std::rewind(from.get());
  if (const int status = run_dot(fileno(from.get()), svg.descriptor(), fileno(says.get())); status != 0) {
    std::string said(4096, '\0');
    std::rewind(says.get());
    said.resize(std::fread(said.data(), 1, said.size(), says.get()));
    throw Error(ErrorKind::backend, str("svg: Graphviz's 'dot' failed with status ", status, ": ", said));
  }
  svg.keep();
}

}  // namespace stepgraph
