//! Jobs on images that are not being served, one module each with a function `run` that prints the result and returns
//! an exit code.

pub mod bench;
pub mod calibrate;
pub mod check;
pub mod compact;
pub mod compare;
pub mod convert;
pub mod copy_up;
pub mod create;
pub mod info;
pub mod map;
pub mod measure;
pub mod merge;
pub mod planned;
pub mod rebase;
pub mod replay;
pub mod resize;
pub mod runner;
pub mod snapshot;
pub mod stream;
