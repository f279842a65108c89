// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <infiniband/verbs.h>

#include <string>

// Macros that call functions of the library, which this program is not linked with.
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

namespace unisono::transport {

// libibverbs, loaded at run time. What its header defines inline (ibv_post_send, ibv_poll_cq, ...)
// calls through the context and needs no entry here.
struct VerbsLibrary {
  // Null where the library cannot be used; `problem` then says why.
  static const VerbsLibrary* get(std::string& problem);

  int queryPort(ibv_context* context, uint8_t port, ibv_port_attr& attributes) const;
  // `access` may have IBV_ACCESS_RELAXED_ORDERING, which libraries that are too old for it ignore.
  ibv_mr* registerMemory(ibv_pd* domain, void* data, size_t bytes, int access) const;

  int (*fork_init)();
  ibv_device** (*get_device_list)(int* count);
  void (*free_device_list)(ibv_device** list);
  ibv_context* (*open_device)(ibv_device* device);
  int (*close_device)(ibv_context* context);
  int (*query_device)(ibv_context* context, ibv_device_attr* attributes);
  int (*query_port)(ibv_context* context, uint8_t port, _compat_ibv_port_attr* attributes);
  int (*query_gid)(ibv_context* context, uint8_t port, int index, ibv_gid* gid);
  ibv_pd* (*alloc_pd)(ibv_context* context);
  int (*dealloc_pd)(ibv_pd* domain);
  ibv_mr* (*reg_mr)(ibv_pd* domain, void* data, size_t bytes, int access);
  // Since version 1.8 of its interface; may be null.
  ibv_mr* (*reg_mr_iova2)(ibv_pd* domain, void* data, size_t bytes, uint64_t address,
                          unsigned int access);
  // Since version 1.12; may be null.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* domain, uint64_t offset, size_t bytes, uint64_t address,
                           int descriptor, int access);
  int (*dereg_mr)(ibv_mr* region);
  ibv_cq* (*create_cq)(ibv_context* context, int entries, void* user, ibv_comp_channel* channel,
                       int vector);
  int (*destroy_cq)(ibv_cq* queue);
  ibv_qp* (*create_qp)(ibv_pd* domain, ibv_qp_init_attr* attributes);
  int (*modify_qp)(ibv_qp* pair, ibv_qp_attr* attributes, int mask);
  int (*destroy_qp)(ibv_qp* pair);
  int (*get_async_event)(ibv_context* context, ibv_async_event* event);
  void (*ack_async_event)(ibv_async_event* event);
  const char* (*event_type_str)(ibv_event_type type);
  const char* (*wc_status_str)(ibv_wc_status status);
};

}  // namespace unisono::transport
