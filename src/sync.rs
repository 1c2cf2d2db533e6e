//! The one place that names atomics and locks, so that a model checker can take their place.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::Weak;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
