// Streams, events and memory of the simulated device, with the order that events give to all work.
//
// The work of a default stream is done when it is issued. The work of every other stream waits in
// the stream's queue until somebody needs it: a stream that waits for an event flushes what lies
// ahead of the event, and so does the host. So a result that nobody has waited for is not there yet.
//
// What laziness cannot show (a copy that should have waited for the default stream finds its bytes
// there all the same) the vector clocks show, as in a race detector (Lamport 1978, Mattern 1989):
//
//     clocks[s][t]   of the work of stream t, how much is over before the next work of stream s
//     host[t]        of the work of stream t, how much is over for the host, and so for all new work
//     access         stream, its time, bytes from and to, read or write
//
// Two accesses to the same bytes, one of them a write, must be ordered; to take memory is a write of
// the stream that is current then, and so is to free it, because its next owner writes there.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>

// Of Python, which has loaded this library.
extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace sim {

constexpr int kDevices = 2;
constexpr int kPool = 32;  // streams of a device beside the default one, handed out in turn as CUDA's
constexpr int kStreamsOfDevice = 1 + kPool;
constexpr int kStreams = kDevices * kStreamsOfDevice;
constexpr int kHost = -1;  // the device of pinned memory
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating-point type
constexpr size_t kAlignment = 64;
constexpr size_t kManyAccesses = 64;

using Clock = std::array<uint64_t, kStreams>;

inline int stream_slot(int device, int64_t id) {
  return device * kStreamsOfDevice + static_cast<int>(id);
}
inline int device_of(int slot) { return slot / kStreamsOfDevice; }
inline bool is_default(int slot) { return slot % kStreamsOfDevice == 0; }

inline std::string name_of(int slot) {
  const int id = slot % kStreamsOfDevice;
  return (id ? "stream " + std::to_string(id) : std::string("the default stream")) + " of sim:" +
         std::to_string(device_of(slot));
}

struct Access {
  int slot;
  uint64_t at;
  bool writes;
  uintptr_t begin, end;
};

// A block of device memory, or of pinned host memory.
struct Block {
  size_t size;
  int device;
  int slot;         // the stream that was current when it was taken
  uint64_t serial;  // two blocks at the same address differ in it
  std::shared_ptr<char> memory;
  std::vector<Access> accesses;
  std::set<int> lent;  // streams that it waits for when it is freed (record_stream)
};

// A use of a block by work that is done later.
struct Use {
  uintptr_t start;
  uint64_t serial;
  bool on_device;
  std::shared_ptr<char> memory;  // of pinned memory, which the allocator keeps until work is done
};

struct EventState {
  int slot;
  uint64_t index;
  Clock clock;
  bool passed;
  double milliseconds;
};

// One entry of a stream's queue: work, a wait for an event, or an event.
struct Entry {
  std::function<void()> work;
  std::vector<Use> uses;
  std::shared_ptr<EventState> wait_for;
  std::shared_ptr<EventState> event;
};

struct Queue {
  std::deque<Entry> entries;
  uint64_t done = 0;
  uint64_t end() const { return done + entries.size(); }
};

struct Counters {
  int64_t host_syncs = 0;
  int64_t bytes_to_host = 0;
  int64_t bytes_to_device = 0;
  int64_t late_copies = 0;
  int64_t kernels = 0;
};

class Timeline {
 public:
  std::recursive_mutex mutex;
  Counters counters;
  std::mt19937 random{0};
  double passes = 0.3;  // the chance that a query finds an event passed that need not be yet
  std::array<size_t, kDevices> held{}, peak{}, limit{};

  // ---- problems: raised by the next call, as CUDA's errors are; those of a free have no caller

  void report(const std::string& what) { problems_.push_back("simulated device: " + what); }

  void raise_problems() {
    if (raised_ < problems_.size()) {
      const std::string first = problems_[raised_];
      raised_ = problems_.size();
      TORCH_CHECK(false, first);
    }
  }

  const std::vector<std::string>& problems() const { return problems_; }

  // ---- memory

  char* take(size_t size, int device, int slot) {
    std::shared_ptr<char> memory(
        static_cast<char*>(std::aligned_alloc(kAlignment, rounded(size))), std::free);
    TORCH_CHECK(memory, "simulated device: the host has no ", size, " bytes");
    std::memset(memory.get(), kPoison, size);
    char* start = memory.get();
    const auto key = reinterpret_cast<uintptr_t>(start);
    Block block{size, device, slot, ++serial_, std::move(memory), {}, {}};
    if (device != kHost) {
      block.accesses.push_back({slot, tick(slot), true, key, key + size});
      held[device] += size;
      peak[device] = std::max(peak[device], held[device]);
    }
    blocks_[key] = std::move(block);
    return start;
  }

  void free(void* start) {
    const auto found = blocks_.find(reinterpret_cast<uintptr_t>(start));
    if (found == blocks_.end()) {
      return;
    }
    Block& block = found->second;
    if (block.device != kHost) {
      if (!is_default(block.slot)) {
        flush_all_of(block.slot);
      }
      for (const int slot : block.lent) {
        flush_all_of(slot);
      }
      for (const Access& access : block.accesses) {
        if (!block.lent.count(access.slot) && !before(access, block.slot)) {
          report(
              name_of(access.slot) + (access.writes ? " writes" : " reads") +
              " memory that was freed before any event said that it is done");
          break;
        }
      }
      std::memset(start, kPoison, block.size);
      held[block.device] -= block.size;
    }
    blocks_.erase(found);
  }

  Block* block_of(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) {
      return nullptr;
    }
    --next;
    return address < next->first + std::max<size_t>(next->second.size, 1) ? &next->second : nullptr;
  }

  void lend(const void* pointer, int slot) {
    if (Block* block = block_of(pointer)) {
      block->lent.insert(slot);
    }
  }

  // ---- order

  // Work of a stream reads or writes bytes; memory that is neither a device's nor pinned is ignored.
  void touch(int slot, const void* pointer, size_t size, bool writes) {
    Block* block = size ? block_of(pointer) : nullptr;
    if (!block) {
      return;
    }
    const auto begin = reinterpret_cast<uintptr_t>(pointer);
    const Access now{slot, tick(slot), writes, begin, begin + size};
    for (const Access& earlier : block->accesses) {
      const bool overlap = earlier.begin < now.end && now.begin < earlier.end;
      if (overlap && (earlier.writes || writes) && !before(earlier, slot)) {
        report(
            name_of(slot) + (writes ? " writes" : " reads") + " memory that " +
            name_of(earlier.slot) + (earlier.writes ? " writes" : " reads") +
            ", and no event orders the two");
        break;
      }
    }
    auto& all = block->accesses;
    const auto covered = [&](const Access& earlier) {
      const bool inside = now.begin <= earlier.begin && earlier.end <= now.end;
      return inside && (writes || (earlier.slot == slot && !earlier.writes));
    };
    all.erase(std::remove_if(all.begin(), all.end(), covered), all.end());
    all.push_back(now);
    if (all.size() > kManyAccesses) {
      merge(*block, slot);
    }
    raise_problems();
  }

  // ---- streams

  void add(int slot, std::function<void()> work, std::initializer_list<const void*> pointers) {
    Entry entry;
    entry.work = std::move(work);
    for (const void* pointer : pointers) {
      if (const Block* block = block_of(pointer)) {
        const bool on_device = block->device != kHost;
        entry.uses.push_back(
            {reinterpret_cast<uintptr_t>(block->memory.get()), block->serial, on_device,
             on_device ? nullptr : block->memory});
      }
    }
    queues_[slot].entries.push_back(std::move(entry));
  }

  // Does all work of a stream ahead of an entry, and what that waits for.
  void flush(int slot, uint64_t index) {
    Queue& queue = queues_[slot];
    while (queue.done < index) {
      const Entry entry = std::move(queue.entries.front());
      queue.entries.pop_front();
      queue.done++;
      if (entry.wait_for) {
        flush(entry.wait_for->slot, entry.wait_for->index);
      } else if (entry.event) {
        entry.event->passed = true;
        entry.event->milliseconds = now();
      } else if (all_live(entry.uses)) {
        entry.work();
      } else {
        report("late work of " + name_of(slot) + " uses freed memory");
      }
    }
  }

  void flush_all_of(int slot) { flush(slot, queues_[slot].end()); }

  // ---- events

  std::shared_ptr<EventState> record(int slot) {
    tick(slot);
    auto event = std::make_shared<EventState>(
        EventState{slot, queues_[slot].end() + 1, clocks_[slot], false, 0});
    Entry entry;
    entry.event = event;
    queues_[slot].entries.push_back(std::move(entry));
    return event;
  }

  void wait(int slot, const std::shared_ptr<EventState>& event) {
    join(clocks_[slot], event->clock);
    if (slot == event->slot) {
      return;
    }
    if (is_default(slot)) {
      flush(event->slot, event->index);
    } else {
      Entry entry;
      entry.wait_for = event;
      queues_[slot].entries.push_back(std::move(entry));
    }
  }

  // One stream goes on after all that another has been given so far.
  void wait_for_stream(int slot, int other) {
    if (slot != other) {
      wait(slot, record(other));
    }
  }

  bool query(const std::shared_ptr<EventState>& event) {
    if (!event->passed && std::uniform_real_distribution<>(0, 1)(random) >= passes) {
      return false;
    }
    reach(event);
    return true;
  }

  // The host has seen that an event is passed.
  void reach(const std::shared_ptr<EventState>& event) {
    flush(event->slot, event->index);
    join(host_, event->clock);
    raise_problems();
  }

  void synchronize(int slot) {
    flush_all_of(slot);
    join(host_, clocks_[slot]);
    raise_problems();
  }

  void synchronize_device(int device) {
    for (int id = 0; id < kStreamsOfDevice; id++) {
      const int slot = stream_slot(device, id);
      flush_all_of(slot);
      join(host_, clocks_[slot]);
    }
    raise_problems();
  }

  // ---- between tests: what a test has left undone is dropped

  void reset(unsigned seed) {
    for (int slot = 0; slot < kStreams; slot++) {
      Queue& queue = queues_[slot];
      queue.done = queue.end();
      for (Entry& entry : queue.entries) {
        if (entry.event) {
          entry.event->passed = true;
        }
      }
      queue.entries.clear();
      join(host_, clocks_[slot]);
    }
    problems_.clear();
    raised_ = 0;
    counters = {};
    random.seed(seed);
    passes = 0.3;
    limit.fill(0);
    peak = held;
  }

 private:
  static size_t rounded(size_t size) {
    return std::max<size_t>(1, (size + kAlignment - 1) / kAlignment) * kAlignment;
  }

  static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
  }

  static void join(Clock& into, const Clock& other) {
    for (int slot = 0; slot < kStreams; slot++) {
      into[slot] = std::max(into[slot], other[slot]);
    }
  }

  // The time of a stream's next work, which comes after all that the host has seen to be done.
  uint64_t tick(int slot) {
    join(clocks_[slot], host_);
    return ++clocks_[slot][slot];
  }

  bool before(const Access& access, int slot) const {
    return access.slot == slot ||
           access.at <= std::max(clocks_[slot][access.slot], host_[access.slot]);
  }

  bool all_live(const std::vector<Use>& uses) {
    return std::all_of(uses.begin(), uses.end(), [&](const Use& use) {
      if (!use.on_device) {
        return true;
      }
      const auto found = blocks_.find(use.start);
      return found != blocks_.end() && found->second.serial == use.serial;
    });
  }

  // Many small accesses of one stream become one read and one write that span them all.
  static void merge(Block& block, int slot) {
    std::array<Access, 2> hulls{
        Access{slot, 0, false, UINTPTR_MAX, 0}, Access{slot, 0, true, UINTPTR_MAX, 0}};
    std::vector<Access> rest;
    for (const Access& access : block.accesses) {
      if (access.slot == slot) {
        Access& hull = hulls[access.writes];
        hull.at = std::max(hull.at, access.at);
        hull.begin = std::min(hull.begin, access.begin);
        hull.end = std::max(hull.end, access.end);
      } else {
        rest.push_back(access);
      }
    }
    for (const Access& hull : hulls) {
      if (hull.end) {
        rest.push_back(hull);
      }
    }
    block.accesses = std::move(rest);
  }

  std::map<uintptr_t, Block> blocks_;
  std::array<Queue, kStreams> queues_;
  std::array<Clock, kStreams> clocks_{};
  Clock host_{};
  std::vector<std::string> problems_;
  size_t raised_ = 0;
  uint64_t serial_ = 0;
};

// Lives as long as the process: tensors are freed after statics are.
inline Timeline& timeline() {
  static auto* found = new Timeline();
  return *found;
}

// Holds the timeline. Who holds Python's lock gives that away while it waits, as whoever has the
// timeline may need it: to hold a tensor once more that Python knows takes Python's lock.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    while (!mutex_.try_lock()) {
      void* const state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
      std::this_thread::yield();
      if (state) {
        PyEval_RestoreThread(state);
      }
    }
  }
  ~Lock() { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::recursive_mutex& mutex_;
};

}  // namespace sim
