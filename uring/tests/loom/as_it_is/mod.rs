//! The code as it is in the engine.

on_top_of!(loom::sync::atomic::fence, Release);
