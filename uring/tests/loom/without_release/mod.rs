//! A planted mistake: a position is published before the value in its place.
#![allow(dead_code, reason = "one scenario is enough")]

on_top_of!(loom::sync::atomic::fence, Relaxed);
