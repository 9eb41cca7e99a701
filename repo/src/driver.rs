//! Drivers of storage repositories: the directories that contain images. They know files by name; the contents are the
//! disk process's business.

mod directory;
mod durable;
pub mod filesystem;
mod label;
mod last_host;
pub mod mount;
mod repository;
mod same_file;
mod scratch;
mod unfinished;

pub use directory::{Capacity, Directory, Entry, FileNumbers, LOCK, UNFINISHED, end_map, file_failed, is_used};
pub use durable::Appended;
pub use label::{LABEL, Label};
pub use last_host::{Last, LastHost, last_host_at, machine};
pub use repository::{
    Attached, DAMAGED, INVENTORY, attach, check_empty, create_directory, make, remove_created, unmake,
};
