// Pipeline: a worker as the GPU has it, in three fibres, around the product's own headers.
//
//   loader --slots[full]--> team --slots[done]--> storer --slots[empty]--> loader
//
// The loader runs TaskSource ahead: up to kSlotCount tasks of a static list, kQueueAhead of a
// queue, through segments and steps that are not open yet. So this is where claims that look ahead,
// tickets of later steps and signals by another thread than the body's are tried. Follows
// scheduler/{loader,team,storer}.cuh, which no host compiler reads; the calls into task_source.hpp,
// queue.hpp, advance.hpp and controller.hpp are the same.
#pragma once
#include "machine.hpp"
#include "worker.hpp"

namespace gpurt::sim {

class World;
enum class Planted : u32;

constexpr u32 kSlotCount = 4;
constexpr u32 kQueueAhead = 2;
constexpr u32 kPipelineFibres = 3;

enum class SlotKind : u32 { kTask, kSkip, kLeave };

// In simulated memory; the counts stand for mbarriers, which release and acquire within a block.
struct PipelineShared {
  struct Slot {
    u64 step;
    u64 round;
    u32 task;
    u32 kind;  // SlotKind
  };
  Slot slots[kSlotCount];
  u64 full;
  u64 done;
  u64 empty;
  u32 leaving;
  u32 reserved;
};

class Pipeline {
 public:
  Pipeline(World& world, const Program& program, u32 worker, PipelineShared* shared,
           Planted planted)
      : world_(world), program_(program), worker_(worker), shared_(shared), planted_(planted) {}

  // One launch each; every one on its own fibre.
  void run_loader();
  void run_team();
  void run_storer();

 private:
  struct Taken {
    u32 task;
    u64 step;
    u64 round;
    u32 policy;
  };

  PipelineShared::Slot& slot(u64 turn) const { return shared_->slots[turn % kSlotCount]; }
  bool is_leaving() const { return load_relaxed(&shared_->leaving) != 0; }
  bool must_leave() const;
  void put(const Taken& taken, SlotKind kind);
  void put_swapped(const Taken& next);
  bool pass_gate(u64 step);
  bool pass_edge(const TaskRecord& record, const Wait& wait, const PipelineShared::Slot& taken);
  void run_task(const TaskRecord& record, PipelineShared::Slot& taken);

  World& world_;
  const Program& program_;
  u32 worker_;
  PipelineShared* shared_;
  Planted planted_;
  u64 fetched_ = 0;
  std::vector<Taken> held_;
};

// The controller's warp.
void run_pipeline_controller(const Program& program);

}  // namespace gpurt::sim
