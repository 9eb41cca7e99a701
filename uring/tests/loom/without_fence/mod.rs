//! A planted mistake: the two full fences of the bell are missing.
#![allow(dead_code, reason = "one scenario is enough")]

on_top_of!(crate::no_fence, Release);
