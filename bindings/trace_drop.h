/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The tracepoint ib_umad:ib_umad_drop: a MAD that reaches nobody, and why. Fields that other events of
 * ib_umad have, too, have the same names and the same byte order there.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM ib_umad
/* The name of a variable; the kernel's header has taken the usual one. */
#undef TRACE_SYSTEM_VAR
#define TRACE_SYSTEM_VAR ib_umad_drop

#if !defined(UMAD_BINDINGS_TRACE_DROP_H) || defined(TRACE_HEADER_MULTI_READ)
#define UMAD_BINDINGS_TRACE_DROP_H

#include <linux/tracepoint.h>

#ifndef UMAD_DROP_REASONS
/* New ones come last: programs may know the numbers. */
#define UMAD_DROP_REASONS \
	UMAD_DROP_REASON(QUEUE_FULL, "queue full") \
	UMAD_DROP_REASON(NO_MEMORY, "no memory") \
	UMAD_DROP_REASON(NO_WAY_BACK, "no way back") \
	UMAD_DROP_REASON(AGENT_GONE, "agent gone") \
	UMAD_DROP_REASON(FILE_GONE, "device gone or file closed") \
	UMAD_DROP_REASON(SEND_FAILED, "send failed or cancelled") \
	UMAD_DROP_REASON(TOO_LONG, "message too long") \
	UMAD_DROP_REASON(TOO_MANY_SENDS, "too many sends") \
	UMAD_DROP_REASON(COPY_FAILED, "copy failed") \
	UMAD_DROP_REASON(DUPLICATE, "duplicate") \
	UMAD_DROP_REASON_LAST(REFUSED, "refused")

#define UMAD_DROP_REASON(name, text) UMAD_DROP_##name,
#define UMAD_DROP_REASON_LAST(name, text) UMAD_DROP_##name
enum umad_drop_reason { UMAD_DROP_REASONS };
#endif

#undef UMAD_DROP_REASON
#undef UMAD_DROP_REASON_LAST
#define UMAD_DROP_REASON(name, text) TRACE_DEFINE_ENUM(UMAD_DROP_##name);
#define UMAD_DROP_REASON_LAST(name, text) TRACE_DEFINE_ENUM(UMAD_DROP_##name);
UMAD_DROP_REASONS

#undef UMAD_DROP_REASON
#undef UMAD_DROP_REASON_LAST
#define UMAD_DROP_REASON(name, text) { UMAD_DROP_##name, text },
#define UMAD_DROP_REASON_LAST(name, text) { UMAD_DROP_##name, text }

TRACE_EVENT(ib_umad_drop,
	TP_PROTO(const struct ib_umad_file *file, const struct ib_user_mad_hdr *umad_hdr,
		 const struct ib_mad_hdr *mad_hdr, enum umad_drop_reason reason, int error),
	TP_ARGS(file, umad_hdr, mad_hdr, reason, error),

	TP_STRUCT__entry(
		__field(u32, dev_index)
		__field(u32, port_num)
		__field(u32, reason)
		__field(int, error)
		__field(u32, id)
		__field(u32, timeout_ms)
		__field(u32, qpn)
		__field(u16, lid)
		__field(u8, grh_present)
		__field(u8, mgmt_class)
		__array(u8, gid, 16)
		__field(u64, tid)
		__field(u32, attr_mod)
		__field(u16, attr_id)
		__field(u16, mad_status)
		__field(u8, class_version)
		__field(u8, method)
	),

	TP_fast_assign(
		__entry->dev_index = file->port->ib_dev->index;
		__entry->port_num = file->port->port_num;
		__entry->reason = reason;
		__entry->error = error;
		__entry->id = umad_hdr->id;
		__entry->timeout_ms = umad_hdr->timeout_ms;
		__entry->qpn = umad_hdr->qpn;
		__entry->lid = umad_hdr->lid;
		__entry->grh_present = umad_hdr->grh_present;
		memcpy(__entry->gid, umad_hdr->gid, sizeof(__entry->gid));
		__entry->mgmt_class = mad_hdr->mgmt_class;
		__entry->tid = mad_hdr->tid;
		__entry->attr_mod = mad_hdr->attr_mod;
		__entry->attr_id = mad_hdr->attr_id;
		__entry->mad_status = mad_hdr->status;
		__entry->class_version = mad_hdr->class_version;
		__entry->method = mad_hdr->method;
	),

	TP_printk("%u:%u %s error %d id 0x%08x ms %u QP%u lid 0x%04x grh 0x%x gid %pI6c  "
		  "MAD: class 0x%x class_ver 0x%x method 0x%x status 0x%04x tid 0x%016llx "
		  "attr_id 0x%04x attr_mod 0x%08x",
		  __entry->dev_index, __entry->port_num,
		  __print_symbolic(__entry->reason, UMAD_DROP_REASONS), __entry->error,
		  __entry->id, __entry->timeout_ms, be32_to_cpu(__entry->qpn),
		  be16_to_cpu(__entry->lid), __entry->grh_present, __entry->gid,
		  __entry->mgmt_class, __entry->class_version, __entry->method,
		  be16_to_cpu(__entry->mad_status), be64_to_cpu(__entry->tid),
		  be16_to_cpu(__entry->attr_id), be32_to_cpu(__entry->attr_mod))
);

#endif

/* Where to find this file. */
#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace_drop
#include <trace/define_trace.h>
