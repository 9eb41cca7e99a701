//! Chores of the project, one word each: `cargo xtask tidy`, `cargo xtask simulate`, …
//!
//! This file knows the names of the chores and nothing of what they do. A chore is a module with a function
//! `run(arguments) -> Result<(), String>`; its error is printed and becomes exit code 1.

#![forbid(unsafe_code)]

mod api_fuzz;
mod bench;
mod demo;
mod guest_kill;
mod man;
mod model;
mod shares;
mod simulate;
mod tidy;
mod xen;
mod xfstests;

use std::process::ExitCode;

/// One chore.
struct Chore {
    name: &'static str,
    about: &'static str,
    run: fn(&[String]) -> Result<(), String>,
}

/// All of them, in the order in which help lists them.
const CHORES: &[Chore] = &[
    Chore {
        name: "tidy",
        about: "check the rules of the house: dependency arrows, unsafe, lengths, heads of files",
        run: tidy::run,
    },
    Chore { name: "man", about: "write the manual pages of tapline's nouns", run: man::run },
    Chore { name: "simulate", about: "crash disk images in every way and compare", run: simulate::run },
    Chore { name: "api-fuzz", about: "ask the daemon for all that its OpenAPI document promises", run: api_fuzz::run },
    Chore { name: "bench", about: "measure Tapline beside its peers", run: bench::run },
    Chore { name: "demo", about: "the life of a thin disk, told with a real guest", run: demo::run },
    Chore {
        name: "guest-test",
        about: "a guest fills a disk, is killed with it, and finds all it fsynced",
        run: demo::guest_test,
    },
    Chore {
        name: "guest-kill",
        about: "a guest survives its disk's process, killed at random moments",
        run: guest_kill::run,
    },
    Chore {
        name: "model",
        about: "random operations and troubles of the real daemon, against what it promises",
        run: model::run,
    },
    Chore { name: "share-test", about: "repositories on real servers of NFS and SMB, in a guest", run: shares::run },
    Chore {
        name: "xfstests",
        about: "the tests that Linux's file systems are held against, on our disks and on QEMU's",
        run: xfstests::run,
    },
    Chore { name: "xen-test", about: "our programs and our peers' backends on real Xen, under QEMU", run: xen::run },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, rest)) = arguments.split_first() else {
        eprint!("{}", usage());
        return ExitCode::from(64);
    };
    if matches!(name.as_str(), "help" | "--help" | "-h") {
        print!("{}", usage());
        return ExitCode::SUCCESS;
    }
    let Some(chore) = CHORES.iter().find(|chore| chore.name == name) else {
        eprint!("xtask: there is no chore «{name}»\n\n{}", usage());
        return ExitCode::from(64);
    };
    match (chore.run)(rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("xtask {name}: {why}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> String {
    let list: String = CHORES.iter().map(|chore| format!("  {:<12} {}\n", chore.name, chore.about)).collect();
    format!("usage: cargo xtask CHORE [ARGUMENT]…\n\n{list}")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn usage_names_every_chore_once() {
        let usage = usage();
        for chore in CHORES {
            assert_eq!(usage.matches(&format!("  {} ", chore.name)).count(), 1, "{}", chore.name);
        }
    }
}
