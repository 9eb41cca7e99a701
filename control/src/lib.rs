//! The control protocol between a disk process and its clients (docs/control.md): requests, answers, events and errors
//! as types, the lines that they travel in, and a client. Also the notation of sizes, progress, errors and foreign text
//! that all command lines use.
//!
//! It knows nothing about disks, and nothing about how a verb is carried out. Invariants: what one end writes the other
//! end reads, also if it is older or newer; a [`Verb`] that was parsed has all the fields it needs and no others.

#![forbid(unsafe_code)]

pub mod answer;
pub mod ask;
pub mod calibration;
pub mod checksum;
mod client;
mod cpu_list;
mod error;
pub mod handed;
mod image_name;
pub mod installed;
pub mod limits;
mod line;
mod method;
pub mod pace;
mod polling_mode;
mod progress;
pub mod redo_name;
pub mod share;
pub mod size;
mod size_rule;
mod text;
pub mod tracking;

pub use ask::{Ask, FileAsked, Request, THREADS_MAX, VERBS, VERSION, Verb};
pub use client::{Client, ClientError};
pub use cpu_list::{CPUS_MAX, CpuList, NotCpus};
pub use error::{Error, Kind};
pub use image_name::{FormatName, ImageName, NotAnImage};
pub use line::{Id, Reply};
pub use polling_mode::{POLLING_MAX_US, PollingMode};
pub use progress::{IsDone, Progress};
pub use size_rule::SizeRule;
pub use text::{in_full, printable};
