// The named cases: what kinds of worlds are simulated, and which bugs are planted.
#pragma once
#include <vector>

#include "world.hpp"

namespace gpurt::sim {

struct NamedCase {
  Case kind;
  Planted planted = Planted::kNothing;
};

const std::vector<NamedCase>& all_cases();
const NamedCase* find_case(const char* name);

}  // namespace gpurt::sim
