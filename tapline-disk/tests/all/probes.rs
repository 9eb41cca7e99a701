//! The USDT probes of the program under test, as tools find them: in notes of the file.

use std::collections::BTreeMap;

use crate::tool::{Room, TAPLINE};

/// Returns the probes of `program` and the number of their arguments, from a listing by readelf.
fn probes(room: &Room, program: &str) -> BTreeMap<String, usize> {
    let said = room.run("readelf", &format!("--notes --wide {program}"));
    assert_eq!(said.code, Some(0), "{said:?}");
    let mut found = BTreeMap::new();
    let mut name = None;
    for line in said.out.lines().map(str::trim) {
        let value = |word: &str| line.strip_prefix(word).map(str::trim);
        if let Some((_, provider)) = line.split_once("Provider: ") {
            name = (provider == "tapline").then(String::new);
        }
        if let (Some(name), Some(probe)) = (&mut name, value("Name:")) {
            *name = probe.to_owned();
        }
        if let (Some(_), Some((_, semaphore))) = (&name, line.split_once("Semaphore: ")) {
            assert_ne!(u64::from_str_radix(semaphore.trim_start_matches("0x"), 16), Ok(0), "{name:?} is always on");
        }
        if let (Some(name), Some(arguments)) = (&name, value("Arguments:")) {
            let arguments: Vec<&str> = arguments.split_whitespace().collect();
            assert!(arguments.iter().all(|one| one.starts_with("-8@")), "{name}: {arguments:?}");
            let before = found.insert(name.clone(), arguments.len());
            assert!(before.is_none_or(|before| before == arguments.len()), "{name} has two forms");
        }
    }
    found
}

#[test]
fn a_stripped_program_has_all_probes_with_their_arguments() {
    let room = Room::new();
    let all = [("answered", 5), ("completed", 1), ("mapped", 1), ("submitted", 1), ("taken", 4)];
    let all = all.map(|(name, arguments)| (name.to_owned(), arguments)).into();
    assert_eq!(probes(&room, TAPLINE), all);
    // As in packages, and without any symbols.
    for how in ["--strip-debug", "--strip-all"] {
        let stripped = room.file("stripped").display().to_string();
        let said = room.run("strip", &format!("{how} -o {stripped} {TAPLINE}"));
        assert_eq!(said.code, Some(0), "{said:?}");
        assert_eq!(probes(&room, &stripped), all, "{how}");
    }
}
