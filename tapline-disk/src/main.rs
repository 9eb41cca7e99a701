//! `tapline-disk`: the disk process. It serves one image, or runs one image job; it is the only program of
//! Tapline that parses images.
//!
//! This file knows how a command line becomes a command and how a command's end becomes an exit code.

#![forbid(unsafe_code)]

mod cli;
mod failure;
mod image_name;
mod paste;
mod progress;
mod size;
mod stats;

use std::process::ExitCode;

use clap::Parser;

use failure::Exit;

fn main() -> ExitCode {
    let arguments = match cli::Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(refused) => return explain(&refused),
    };
    let _ = arguments;
    ExitCode::SUCCESS
}

/// Prints help, a version, or why the arguments make no sense.
fn explain(refused: &clap::Error) -> ExitCode {
    let exit = if refused.use_stderr() { Exit::Usage } else { Exit::Done };
    match refused.print() {
        Ok(()) => ExitCode::from(exit.code()),
        Err(_) => ExitCode::from(Exit::Failed.code()),
    }
}
