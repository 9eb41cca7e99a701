//! The program behind `make demo`. It is small because a new user waits until it is compiled.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

/// Shows the life of a thin disk with a real guest
#[derive(Parser)]
#[command(name = "demo")]
struct Line {
    #[command(flatten)]
    demo: testbed::demo::Demo,
}

fn main() -> ExitCode {
    match testbed::demo::run(&Line::parse().demo) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("demo: {why}");
            ExitCode::FAILURE
        }
    }
}
