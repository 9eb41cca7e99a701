//! Chores of the project, as `cargo xtask NAME`.
mod demo;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((name, rest)) if name == "demo" => demo::run(rest),
        Some((name, rest)) if name == "guest-test" => demo::guest_test(rest),
        _ => {
            eprintln!("usage: cargo xtask demo|guest-test");
            ExitCode::from(2)
        }
    }
}
