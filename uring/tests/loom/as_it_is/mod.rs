//! As the engine has it.

on_top_of!(loom::sync::atomic::fence, Release);
