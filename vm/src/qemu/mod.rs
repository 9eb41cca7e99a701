//! QEMU: a machine's hardware, the command line for it, and the running machine.

pub mod accelerator;
pub mod account;
pub mod command_line;
pub mod console;
pub mod hardware;
mod hear;
pub mod machine;
pub mod platform;
pub mod process;
pub mod seed;
pub mod served;
pub mod slots;
pub mod version;
