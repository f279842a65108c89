// SPDX-License-Identifier: Apache-2.0
#include "transport/net/verbs_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <memory>
#include <utility>

namespace unisono::transport {
namespace {

struct Loaded {
  std::unique_ptr<VerbsLibrary> library;
  std::string problem;
};

Loaded load() {
  void* handle = nullptr;
  std::string problem;
  for (const char* name : {"libibverbs.so.1", "libibverbs.so"}) {
    if (handle == nullptr) handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr && problem.empty()) problem = ::dlerror();
  }
  if (handle == nullptr) return {nullptr, fmt::format("libibverbs cannot be loaded ({})", problem)};
  auto library = std::make_unique<VerbsLibrary>();
  const char* missing = nullptr;
  const auto find = [&]<typename Function>(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(handle, name));
    if (function == nullptr) missing = name;
  };
  find("ibv_fork_init", library->fork_init);
  find("ibv_get_device_list", library->get_device_list);
  find("ibv_free_device_list", library->free_device_list);
  find("ibv_open_device", library->open_device);
  find("ibv_close_device", library->close_device);
  find("ibv_query_device", library->query_device);
  find("ibv_query_port", library->query_port);
  find("ibv_query_gid", library->query_gid);
  find("ibv_alloc_pd", library->alloc_pd);
  find("ibv_dealloc_pd", library->dealloc_pd);
  find("ibv_reg_mr", library->reg_mr);
  find("ibv_dereg_mr", library->dereg_mr);
  find("ibv_create_cq", library->create_cq);
  find("ibv_destroy_cq", library->destroy_cq);
  find("ibv_create_qp", library->create_qp);
  find("ibv_modify_qp", library->modify_qp);
  find("ibv_destroy_qp", library->destroy_qp);
  find("ibv_get_async_event", library->get_async_event);
  find("ibv_ack_async_event", library->ack_async_event);
  find("ibv_event_type_str", library->event_type_str);
  find("ibv_wc_status_str", library->wc_status_str);
  if (missing != nullptr) return {nullptr, fmt::format("libibverbs has no {}", missing)};
  find("ibv_reg_mr_iova2", library->reg_mr_iova2);
  find("ibv_reg_dmabuf_mr", library->reg_dmabuf_mr);
  // A child of fork() must not share pages that an adapter writes.
  static_cast<void>(library->fork_init());
  return {std::move(library), ""};
}

}  // namespace

// Never closed: drivers of adapters may have threads.
const VerbsLibrary* VerbsLibrary::get(std::string& problem) {
  static const Loaded& loaded = *new Loaded(load());
  problem = loaded.problem;
  return loaded.library.get();
}

int VerbsLibrary::queryPort(ibv_context* context, uint8_t port, ibv_port_attr& attributes) const {
  attributes = {};
  // The exported function fills only the first part of the structure.
  if (verbs_context* extended = verbs_get_ctx_op(context, query_port)) {
    return extended->query_port(context, port, &attributes, sizeof(attributes));
  }
  return query_port(context, port, reinterpret_cast<_compat_ibv_port_attr*>(&attributes));
}

ibv_mr* VerbsLibrary::registerMemory(ibv_pd* domain, void* data, size_t bytes, int access) const {
  if ((access & IBV_ACCESS_RELAXED_ORDERING) != 0 && reg_mr_iova2 != nullptr) {
    return reg_mr_iova2(domain, data, bytes, reinterpret_cast<uintptr_t>(data),
                        static_cast<unsigned int>(access));
  }
  return reg_mr(domain, data, bytes, access & ~IBV_ACCESS_RELAXED_ORDERING);
}

}  // namespace unisono::transport
