//! `tapline` without a daemon: what it passes on, and what it does itself.

mod disk;
mod hand_over;
mod top;
mod upgrade_running;
mod xen;
