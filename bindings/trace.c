// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* The tracepoints themselves, and a function for each that Rust calls while it is on. */

#define CREATE_TRACE_POINTS
#define CREATE_RUST_TRACE_POINTS
#include "trace.h"
