//! Chores of the project, one word each: `cargo xtask tidy`, `cargo xtask simulate`, …
//!
//! This file knows only the names of the chores. A chore is a function `run(&options) -> Result<(), String>`; an error
//! is printed and becomes exit code 1.

#![forbid(unsafe_code)]

mod api_fuzz;
mod clients;
mod man;
mod simulate;
mod tidy;

use std::process::ExitCode;

use clap::Parser;

/// Chores of the project
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Line {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(clap::Subcommand)]
enum Chore {
    Tidy(tidy::Options),
    /// Write the manual pages
    Man,
    /// Write the operations of the clients in other languages
    Clients,
    Simulate(Box<simulate::Options>),
    ApiFuzz(api_fuzz::Options),
    /// Measure Tapline and its peers
    #[command(subcommand)]
    Bench(bench::Bench),
    Bootstorm(testbed::bootstorm::Plan),
    GuestTest(testbed::demo::GuestTest),
    GuestKill(testbed::guest_kill::Options),
    Model(model::Options),
    Replaced(Box<model::replaced::Options>),
    ShareTest(testbed::shares::Options),
    Xfstests(testbed::xfstests::Options),
    XenTest(testbed::xen::Options),
}

fn main() -> ExitCode {
    let (name, done) = match &Line::parse().chore {
        Chore::Tidy(options) => ("tidy", tidy::run(options)),
        Chore::Clients => ("clients", clients::run()),
        Chore::Man => ("man", man::run()),
        Chore::Simulate(options) => ("simulate", simulate::run(options)),
        Chore::ApiFuzz(options) => ("api-fuzz", api_fuzz::run(options)),
        Chore::Bench(bench) => ("bench", bench::run(bench)),
        Chore::Bootstorm(plan) => ("bootstorm", testbed::bootstorm::run(plan)),
        Chore::GuestTest(options) => ("guest-test", testbed::demo::guest_test(options)),
        Chore::GuestKill(options) => ("guest-kill", testbed::guest_kill::run(options)),
        Chore::Model(options) => ("model", model::run(options)),
        Chore::Replaced(options) => ("replaced", model::replaced::run(options)),
        Chore::ShareTest(options) => ("share-test", testbed::shares::run(options)),
        Chore::Xfstests(options) => ("xfstests", testbed::xfstests::run(options)),
        Chore::XenTest(options) => ("xen-test", testbed::xen::run(options)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("xtask {name}: {why}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod test {
    use clap::CommandFactory;

    #[test]
    fn every_option_of_every_chore_is_sound() {
        super::Line::command().debug_assert();
    }
}
