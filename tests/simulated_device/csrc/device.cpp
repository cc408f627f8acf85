// The simulated device as PyTorch sees it: allocators, streams and events, and operators.
//
// Every operator is the CPU's, on the same memory, so its results are the CPU's to the bit; that
// holds too for those that PyTorch puts together from others on a device it does not know (group
// norm, convolution, dropout), which are registered here by name or because the CPU has one.
// torch.ops.sim is what tests ask of the device: its counters, limits and problems.

#include <cmath>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "timeline.h"

namespace {

using at::IntArrayRef;
using at::Tensor;
using sim::Lock;
using sim::timeline;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);
const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);

thread_local int current_device = 0;
thread_local std::array<int64_t, sim::kDevices> current_stream{};

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
int slot_of(const c10::Stream& stream) {
  return sim::stream_slot(stream.device_index(), stream.id());
}
int current_slot(int device) { return sim::stream_slot(device, current_stream[device]); }
int current_slot(c10::Device device) { return current_slot(index_of(device)); }
bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// ---- memory

void free_block(void* start) {
  Lock lock(timeline().mutex);
  timeline().free(start);
}

std::string mebibytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kSim, static_cast<c10::DeviceIndex>(current_device));
    if (!size) {
      return {nullptr, nullptr, &free_block, device};
    }
    Lock lock(timeline().mutex);
    const size_t limit = timeline().limit[current_device], held = timeline().held[current_device];
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        !limit || held + size <= limit,
        "sim out of memory. Tried to allocate ", mebibytes(size), ". Device ", current_device,
        " has a total capacity of ", mebibytes(limit), " of which ",
        mebibytes(limit - std::min(held, limit)), " is free.");
    char* start = timeline().take(size, current_device, current_slot(current_device));
    return {start, start, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(timeline().mutex);
    timeline().lend(data.get(), slot_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(timeline().mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*each)[0].current = static_cast<int64_t>(timeline().held[device]);
      (*each)[0].peak = static_cast<int64_t>(timeline().peak[device]);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(timeline().mutex);
    timeline().peak[device] = timeline().held[device];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(timeline().mutex);
    const size_t total = timeline().limit[device] ? timeline().limit[device] : size_t{1} << 36;
    return {total - std::min(total, timeline().held[device]), total};
  }
};

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(timeline().mutex);
    char* start = size ? timeline().take(size, sim::kHost, 0) : nullptr;
    return {start, start, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

SimAllocator sim_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kSim, &sim_allocator);
REGISTER_HOST_ALLOCATOR(kSim, &pinned_allocator);

bool is_pinned(const void* pointer) {
  Lock lock(timeline().mutex);
  const sim::Block* block = timeline().block_of(pointer);
  return block && block->device == sim::kHost;
}

// ---- devices, streams, events

using Event = std::shared_ptr<sim::EventState>;

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  SimGuard() = default;
  explicit SimGuard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return sim::kDevices; }
  c10::Device getDevice() const override { return device(current_device); }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(index_of(to) < sim::kDevices, "there is no device ", to);
    current_device = index_of(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = index_of(to); }

  c10::Stream getStream(c10::Device of) const override {
    return stream(index_of(of), current_stream[index_of(of)]);
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(index_of(of), 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    Lock lock(timeline().mutex);
    static std::array<int64_t, sim::kDevices> made{};
    return stream(index_of(of), 1 + made[index_of(of)]++ % sim::kPool);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return getNewStream(of, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return before;
  }
  bool queryStream(const c10::Stream& asked) const override {
    Lock lock(timeline().mutex);
    return timeline().query(timeline().record(slot_of(asked)));
  }
  void synchronizeStream(const c10::Stream& asked) const override {
    Lock lock(timeline().mutex);
    timeline().counters.host_syncs++;
    timeline().synchronize(slot_of(asked));
  }
  void synchronizeDevice(const c10::DeviceIndex asked) const override {
    Lock lock(timeline().mutex);
    timeline().counters.host_syncs++;
    timeline().synchronize_device(asked);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& user) const override {
    sim_allocator.recordStream(data, user);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    Lock lock(timeline().mutex);
    if (!*event) {
      *event = new Event();
    }
    *static_cast<Event*>(*event) = timeline().record(slot_of(on));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    Lock lock(timeline().mutex);
    delete static_cast<Event*>(event);
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) {
      Lock lock(timeline().mutex);
      timeline().wait(slot_of(on), *static_cast<Event*>(event));
      timeline().raise_problems();
    }
  }
  bool queryEvent(void* event) const override {
    Lock lock(timeline().mutex);
    return !event || timeline().query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) {
      Lock lock(timeline().mutex);
      timeline().counters.host_syncs++;
      timeline().reach(*static_cast<Event*>(event));
    }
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    Lock lock(timeline().mutex);
    const Event &first = *static_cast<Event*>(begin), &last = *static_cast<Event*>(end);
    TORCH_CHECK(first->passed && last->passed, "both events must be passed to be compared");
    return last->milliseconds - first->milliseconds;
  }

 private:
  static c10::Device device(int index) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }
  static c10::Stream stream(int index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device(index), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

// One for each device, with the numbers of the CPU's generator.
const at::Generator& default_generator(int device) {
  static auto* found = new std::array<at::Generator, sim::kDevices>{
      at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};
  return (*found)[device < 0 ? current_device : device];
}

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return sim::kDevices; }
  void setCurrentDevice(c10::DeviceIndex to) const override { guard_.setDevice({kSim, to}); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return guard_.exchangeDevice({kSim, to}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return guard_.exchangeDevice({kSim, to}).index();
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* pointer) const override {
    Lock lock(timeline().mutex);
    const sim::Block* block = timeline().block_of(pointer);
    TORCH_CHECK(block && block->device != sim::kHost, "no memory of the simulated device");
    return {kSim, static_cast<c10::DeviceIndex>(block->device)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = sim_allocator.allocate(size);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept) {
      std::memcpy(data.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }

 private:
  SimGuard guard_;
};

// ---- operators

Tensor made_of(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

// A CPU tensor on the memory of another tensor, which owns nothing. Late work may write to it when
// inference mode has ended.
Tensor borrowed(const Tensor& tensor) {
  const c10::InferenceMode as_usual(false);
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::kCPU));
  c10::Storage same(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
      c10::GetAllocator(c10::kCPU), true);
  return made_of(std::move(same), kCpuKeys, tensor);
}

Tensor on_cpu(const Tensor& tensor) { return is_sim(tensor) ? borrowed(tensor) : tensor; }

Tensor to_device(const Tensor& result, c10::Device device) {
  const c10::DeviceGuard guard(device);
  const size_t size = result.storage().nbytes();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), size, sim_allocator.allocate(size), &sim_allocator, true);
  if (size) {
    std::memcpy(storage.mutable_data(), result.storage().data(), size);
  }
  return made_of(std::move(storage), kSimKeys, result);
}

// Bytes from the first element of a tensor to the end of its last.
size_t span_of(const Tensor& tensor) {
  if (!tensor.numel()) {
    return 0;
  }
  int64_t last = 0;
  for (int64_t at = 0; at < tensor.dim(); at++) {
    last += (tensor.size(at) - 1) * tensor.stride(at);
  }
  return static_cast<size_t>(last + 1) * tensor.itemsize();
}

const char* first_byte(const Tensor& tensor) {
  return static_cast<const char*>(tensor.storage().data()) +
         tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
}

void touch(int slot, const Tensor& tensor, bool writes) {
  if (tensor.numel()) {
    timeline().touch(slot, first_byte(tensor), span_of(tensor), writes);
  }
}

void await_host(int slot) {
  timeline().counters.host_syncs++;
  timeline().synchronize(slot);
}

// On a stream of its own a kernel's results are there once the stream is waited for.
void put_off(int slot, const Tensor& target, const Tensor& before) {
  const Tensor memory = borrowed(target);
  const Tensor after = memory.clone();
  memory.copy_(before);
  timeline().add(slot, [memory, after] { memory.copy_(after); }, {first_byte(target)});
}

// Operators whose result has a size that the host must learn from the device.
bool asks_for_a_size(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> names{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::repeat_interleave"};
  return names.count(schema.name()) > 0;
}

class Kernel {
 public:
  Kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack) {}

  void run() {
    const at::AutoDispatchBelowADInplaceOrView below;
    take_arguments();
    {
      Lock lock(timeline().mutex);
      timeline().raise_problems();
      timeline().counters.kernels++;
      slot_ = current_slot(device_);
      if (!sim::is_default(slot_)) {
        timeline().flush_all_of(slot_);
      }
      for (const Argument& each : arguments_) {
        if (each.writes || !each.is_view) {
          touch(slot_, each.on_device, each.writes);
        }
      }
    }
    if (!sim::is_default(slot_)) {
      for (Argument& each : arguments_) {
        if (each.writes) {
          each.before = each.on_cpu.clone();
        }
      }
    }
    op_.redispatchBoxed(kCpuKeys, stack_);
    give_results();
  }

 private:
  struct Argument {
    Tensor on_device, on_cpu, before;
    bool writes, is_view;
  };

  Tensor taken(const Tensor& tensor, const c10::AliasInfo* alias, bool may_be_elsewhere) {
    if (!is_sim(tensor)) {
      const bool is_number = !tensor.defined() || tensor.dim() == 0;
      if (!is_number && !may_be_elsewhere) {
        elsewhere_ = true;
      }
      return tensor;
    }
    TORCH_CHECK(
        arguments_.empty() || tensor.device() == device_ || tensor.dim() == 0,
        schema_.name(), ": expected all tensors to be on the same device, but found ", device_,
        " and ", tensor.device());
    if (arguments_.empty()) {
      device_ = tensor.device();
    }
    const bool writes = alias && alias->isWrite();
    arguments_.push_back({tensor, on_cpu(tensor), {}, writes, alias && !writes});
    return arguments_.back().on_cpu;
  }

  void take_arguments() {
    const size_t count = schema_.arguments().size();
    for (size_t at = 0; at < count; at++) {
      const auto& argument = schema_.arguments()[at];
      const c10::AliasInfo* alias = argument.alias_info();
      c10::IValue& value = (*stack_)[stack_->size() - count + at];
      if (value.isTensor()) {
        value = taken(value.toTensor(), alias, false);
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : value.toTensorVector()) {
          list.push_back(taken(each, alias, false));
        }
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
          // As on CUDA, indices may lie on the host, and a mask is counted there.
          told_ |= each && each->scalar_type() == at::kBool;
          list.push_back(each ? std::optional<Tensor>(taken(*each, alias, true)) : each);
        }
        value = list;
      } else if (value.isDevice()) {
        device_ = value.toDevice();
        value = c10::Device(c10::kCPU);
      } else if (value.isNone() && argument.name() == "generator") {
        draws_at_ = stack_->size() - count + at;
      }
    }
    TORCH_CHECK(
        !elsewhere_ || arguments_.empty(), schema_.name(),
        ": expected all tensors to be on the same device, but found ", device_, " and cpu");
    if (draws_at_) {
      (*stack_)[*draws_at_] = default_generator(index_of(device_));
    }
  }

  Tensor given(const Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    for (const Argument& each : arguments_) {
      if (each.on_cpu.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) {
        return each.on_device;
      }
    }
    for (const Argument& each : arguments_) {
      const void* memory = each.on_device.storage().data();
      if (memory && memory == result.storage().data()) {
        return made_of(each.on_device.storage(), each.on_device.key_set(), result);
      }
    }
    Tensor made = to_device(result, device_);
    if (!sim::is_default(slot_)) {
      Lock lock(timeline().mutex);
      const Tensor unknown = borrowed(made).clone();
      std::memset(unknown.storage().mutable_data(), sim::kPoison, unknown.storage().nbytes());
      put_off(slot_, made, unknown);
    }
    return made;
  }

  // An `out=` tensor that the CPU's kernel has given another size.
  static void follow(const Argument& each) {
    if (each.on_cpu.storage().data() != each.on_device.storage().data()) {
      const size_t size = each.on_cpu.storage().nbytes();
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(each.on_device.storage(), size);
      std::memcpy(each.on_device.storage().mutable_data(), each.on_cpu.storage().data(), size);
    }
    if (each.on_device.sizes() != each.on_cpu.sizes() ||
        each.on_device.strides() != each.on_cpu.strides()) {
      auto* target = each.on_device.unsafeGetTensorImpl();
      target->set_storage_offset(each.on_cpu.storage_offset());
      target->set_sizes_and_strides(each.on_cpu.sizes(), each.on_cpu.strides());
    }
  }

  void give_results() {
    for (const Argument& each : arguments_) {
      if (each.writes) {
        follow(each);
        if (!sim::is_default(slot_) && each.before.sizes() == each.on_device.sizes()) {
          Lock lock(timeline().mutex);
          put_off(slot_, each.on_device, each.before);
        }
      }
    }
    const size_t count = schema_.returns().size();
    for (size_t at = 0; at < count; at++) {
      c10::IValue& value = (*stack_)[stack_->size() - count + at];
      if (value.isTensor()) {
        value = given(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : value.toTensorVector()) {
          list.push_back(given(each));
        }
        value = list;
      } else if (!value.isNone()) {
        told_ = true;  // a number that the host reads
      }
    }
    if (told_ || asks_for_a_size(schema_)) {
      Lock lock(timeline().mutex);
      await_host(slot_);
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::vector<Argument> arguments_;
  c10::Device device_{kSim, static_cast<c10::DeviceIndex>(current_device)};
  std::optional<size_t> draws_at_;
  bool elsewhere_ = false;
  bool told_ = false;
  int slot_ = 0;
};

void as_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Kernel(op, stack).run(); }

c10::Device wanted(std::optional<c10::Device> device) {
  const int index = device && device->has_index() ? device->index() : current_device;
  return {kSim, static_cast<c10::DeviceIndex>(index)};
}

Tensor empty(
    IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(wanted(device));
  const auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  return at::detail::empty_generic(size, &sim_allocator, kSimKeys, type, format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(wanted(device));
  const auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  return at::detail::empty_strided_generic(size, stride, &sim_allocator, kSimKeys, type);
}

// Between two devices both streams take part, as torch orders it on CUDA.
void copy_across(const Tensor& source, const Tensor& target) {
  const int from = current_slot(source.device()), to = current_slot(target.device());
  timeline().wait_for_stream(from, to);
  timeline().flush_all_of(from);
  timeline().flush_all_of(to);
  touch(from, source, false);
  touch(from, target, true);
  on_cpu(target).copy_(on_cpu(source));
  timeline().wait_for_stream(to, from);
  timeline().flush_all_of(to);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Lock lock(timeline().mutex);
  timeline().raise_problems();
  if (is_sim(source) && is_sim(target) && source.device() != target.device()) {
    copy_across(source, target);
    return target;
  }
  const int slot = current_slot((is_sim(source) ? source : target).device());
  const bool to_host = !is_sim(target), from_host = !is_sim(source);
  auto& counters = timeline().counters;
  counters.bytes_to_host += to_host ? target.nbytes() : 0;
  counters.bytes_to_device += from_host ? source.nbytes() : 0;
  touch(slot, source, false);
  touch(slot, target, true);
  const bool pinned = (to_host && is_pinned(first_byte(target))) ||
                      (from_host && is_pinned(first_byte(source)));
  const bool waits = (to_host || from_host) && (!non_blocking || (to_host && !pinned));
  const Tensor into = borrowed(target);
  if (sim::is_default(slot) && (!to_host || waits)) {
    timeline().flush_all_of(slot);
    into.copy_(on_cpu(source));
    if (from_host && pinned && !waits) {
      const Tensor read = borrowed(source), then = read.clone();
      timeline().add(
          slot,
          [read, then] {
            if (!read.equal(then)) {
              timeline().report("the host wrote to pinned memory that a copy still reads");
            }
          },
          {first_byte(source)});
    }
  } else {
    // What the default stream copies, and pageable memory, is read now; all else when it is done.
    const bool now = sim::is_default(slot) || (from_host && !pinned);
    const Tensor from = now ? on_cpu(source).clone() : borrowed(source);
    timeline().add(
        slot, [into, from] { into.copy_(from); }, {first_byte(target), now ? nullptr : first_byte(source)});
    counters.late_copies++;
  }
  if (waits) {
    await_host(slot);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) {
    target.resize_(source.sizes());
  }
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Lock lock(timeline().mutex);
  const int slot = current_slot(tensor.device());
  touch(slot, tensor, false);
  await_host(slot);
  return at::_local_scalar_dense(on_cpu(tensor));
}

Tensor strided_view(
    const Tensor& tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset.value_or(tensor.storage_offset()));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return view;
}

Tensor view(const Tensor& tensor, IntArrayRef size) {
  const at::DimVector sizes = at::infer_size_dv(size, tensor.numel());
  const auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), sizes);
  TORCH_CHECK(
      strides.has_value(), "view size is not compatible with input tensor's size and stride (at ",
      "least one dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return strided_view(tensor, sizes, *strides, tensor.storage_offset());
}

Tensor reshape_alias(const Tensor& tensor, IntArrayRef size, IntArrayRef stride) {
  return strided_view(tensor, size, stride, tensor.storage_offset());
}

Tensor& set_to_part(
    Tensor& tensor, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* target = tensor.unsafeGetTensorImpl();
  target->set_storage_keep_dtype(std::move(storage));
  target->set_storage_offset(offset);
  if (stride.size() == size.size()) {
    target->set_sizes_and_strides(size, stride);
  } else {
    target->set_sizes_contiguous(size);
  }
  return tensor;
}

Tensor& set_to_storage(Tensor& tensor, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_to_part(tensor, std::move(storage), 0, {count}, {1});
}

const Tensor& resize(
    const Tensor& tensor, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* target = tensor.unsafeGetTensorImpl();
  target->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) {
    target->empty_tensor_restride(*format);
  }
  const size_t needed =
      tensor.itemsize() * static_cast<size_t>(tensor.storage_offset() + tensor.numel());
  if (needed > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  }
  return tensor;
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  sim_allocator.recordStream(tensor.storage().data_ptr(), stream);
}

// As the CPU does it; a device that torch does not know gets a fused kernel with other rounding.
Tensor dropout(const Tensor& input, double share, bool training) {
  if (share == 0 || !training || input.sym_numel() == 0) {
    return input;
  }
  const Tensor noise = at::empty_like(input);
  return input.mul(noise.bernoulli_(1 - share).div_(1 - share));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&as_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("as_strided", strided_view);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage", set_to_storage);
  library.impl("set_.source_Storage_storage_offset", set_to_part);
  library.impl("resize_", resize);
  library.impl("record_stream", record_stream);
  library.impl("dropout", dropout);
  const std::unordered_set<std::string> own{
      "aten::empty.memory_format", "aten::empty_strided", "aten::_copy_from",
      "aten::_copy_from_and_resize", "aten::_local_scalar_dense", "aten::as_strided", "aten::view",
      "aten::_reshape_alias", "aten::set_.source_Storage",
      "aten::set_.source_Storage_storage_offset", "aten::resize_", "aten::record_stream"};
  // Put together for an unknown device, where the CPU has a kernel of its own (group norm).
  const auto& dispatcher = c10::Dispatcher::singleton();
  std::unordered_set<std::string> composed;
  for (const auto key :
       {c10::DispatchKey::CompositeExplicitAutograd,
        c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
        c10::DispatchKey::CompositeImplicitAutograd}) {
    for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) {
      composed.insert(c10::toString(name));
    }
  }
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    const std::string text = c10::toString(name);
    if (text.rfind("aten::", 0) == 0 && composed.count(text) && !own.count(text)) {
      library.impl(text.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&as_on_cpu>());
    }
  }
  // Put together on every device, but by another library on each.
  for (const char* name : {"convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&as_on_cpu>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { library.impl("dropout", dropout); }

// ---- autocast, which chooses the precision of operators as it does on CUDA

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_PRECISION_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // `m` by the macros
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_PRECISION_RESULT)
  AT_FORALL_PROMOTE(WIDEST_PRECISION)
}

// ---- what tests ask of the device

int64_t counter(const std::string& name) {
  Lock lock(timeline().mutex);
  const auto& counters = timeline().counters;
  const std::map<std::string, int64_t> all{
      {"host_syncs", counters.host_syncs},
      {"bytes_to_host", counters.bytes_to_host},
      {"bytes_to_device", counters.bytes_to_device},
      {"late_copies", counters.late_copies},
      {"kernels", counters.kernels}};
  return all.at(name);
}

TORCH_LIBRARY(sim, library) {
  library.def("counter(str name) -> int", counter);
  library.def("problems() -> str[]", [] {
    Lock lock(timeline().mutex);
    return timeline().problems();
  });
  library.def("reset(int seed) -> ()", [](int64_t seed) {
    Lock lock(timeline().mutex);
    timeline().reset(static_cast<unsigned>(seed));
  });
  library.def("set_limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    Lock lock(timeline().mutex);
    timeline().limit[device] = static_cast<size_t>(bytes);
  });
  library.def("set_passes(float chance) -> ()", [](double chance) {
    Lock lock(timeline().mutex);
    timeline().passes = chance;
  });
  library.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<int>(device));
  });
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
  return true;
}();

}  // namespace
