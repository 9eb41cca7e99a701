//! Builds stub libraries for a program that is linked with far more than it uses, such as the distributions' fio.
//!
//! Its cluster libraries have 80 MB, which are bound at each start; under emulation this costs seconds in every guest.
//! A stub has the library's name and the versioned symbols that the program needs; every function returns -1.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::BedError;
use crate::guest::at;
use crate::tool;

/// The symbols that a program needs from its libraries.
struct Wants {
    libraries: Vec<String>,
    /// Symbols by library and version.
    versioned: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
    /// Symbols without a library.
    plain: BTreeSet<String>,
}

/// Builds in `directory` a stub of each library of `program` that is not among the `genuine` ones. Returns them by
/// name.
pub fn make(program: &Path, genuine: &[&Path], directory: &Path) -> Result<BTreeMap<String, PathBuf>, BedError> {
    fs::create_dir_all(directory).map_err(at("create", directory))?;
    let mut wants = wants_of(program)?;
    for library in genuine {
        let has = defined_in(&readelf(&["--dyn-syms"], library)?);
        wants.plain.retain(|name| !has.contains(name));
    }
    let is_genuine = |name: &str| genuine.iter().any(|library| library.ends_with(name));
    let mut stubs = BTreeMap::new();
    let mut plain = std::mem::take(&mut wants.plain);
    for library in wants.libraries.iter().filter(|name| !is_genuine(name)) {
        let versions = wants.versioned.remove(library).unwrap_or_default();
        // The first library without versions gets all symbols without a library.
        let loose = if versions.is_empty() { std::mem::take(&mut plain) } else { BTreeSet::new() };
        stubs.insert(library.clone(), compile(library, &versions, &loose, directory)?);
    }
    Ok(stubs)
}

fn compile(
    library: &str,
    versions: &BTreeMap<String, BTreeSet<String>>,
    plain: &BTreeSet<String>,
    directory: &Path,
) -> Result<PathBuf, BedError> {
    let mut code: String = plain.iter().map(|name| format!("int {name}(void) {{ return -1; }}\n")).collect();
    let mut map = String::new();
    for (version, names) in versions {
        map.push_str(&format!("{version} {{}};\n"));
        for name in names {
            let stub = format!("stub_{}_{}", name, version.replace(|c: char| !c.is_ascii_alphanumeric(), "_"));
            code.push_str(&format!("int {stub}(void) {{ return -1; }}\n"));
            code.push_str(&format!("__asm__(\".symver {stub},{name}@@{version}\");\n"));
        }
    }
    let [source, script, stub] = [".c", ".map", ""].map(|suffix| directory.join(format!("{library}{suffix}")));
    fs::write(&source, code).map_err(at("write", &source))?;
    fs::write(&script, &map).map_err(at("write", &script))?;
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-nostdlib", "-w", "-fno-builtin"]).arg(format!("-Wl,-soname,{library}"));
    if !map.is_empty() {
        command.arg(format!("-Wl,--version-script={}", script.display()));
    }
    tool::text(command.arg("-o").arg(&stub).arg(&source))?;
    Ok(stub)
}

fn wants_of(program: &Path) -> Result<Wants, BedError> {
    let dynamic = readelf(&["-d"], program)?;
    let needed = dynamic.lines().filter(|line| line.contains("(NEEDED)"));
    let libraries = needed.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned())).collect();
    let homes = homes_of_versions(&readelf(&["-V"], program)?);
    let mut wants = Wants { libraries, versioned: BTreeMap::new(), plain: BTreeSet::new() };
    for (name, version) in undefined_in(&readelf(&["--dyn-syms"], program)?) {
        match version {
            None => {
                wants.plain.insert(name);
            }
            Some(version) => {
                for library in homes.get(&version).into_iter().flatten() {
                    let versions = wants.versioned.entry(library.clone()).or_default();
                    versions.entry(version.clone()).or_default().insert(name.clone());
                }
            }
        }
    }
    Ok(wants)
}

fn readelf(what: &[&str], file: &Path) -> Result<String, BedError> {
    Ok(tool::text(Command::new("readelf").arg("-W").args(what).arg(file).env("LC_ALL", "C"))?)
}

/// The libraries of each version, from the section of needed versions in `readelf -V`.
fn homes_of_versions(listing: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut homes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut library = String::new();
    let needed = listing.split("Version needs section").nth(1).unwrap_or_default();
    for line in needed.lines() {
        if let Some(file) = word_after(line, "File: ") {
            library = file;
        } else if let Some(version) = word_after(line, "Name: ") {
            homes.entry(version).or_default().insert(library.clone());
        }
    }
    homes
}

fn word_after(line: &str, key: &str) -> Option<String> {
    Some(line.split_once(key)?.1.split_whitespace().next()?.to_owned())
}

/// Undefined symbols with their versions, from `readelf --dyn-syms`.
fn undefined_in(listing: &str) -> Vec<(String, Option<String>)> {
    let fields = listing.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let undefined = fields.filter(|fields| fields.get(6) == Some(&"UND") && fields.get(4) == Some(&"GLOBAL"));
    let split = |fields: Vec<&str>| {
        let name = *fields.get(7)?;
        Some(match name.split_once('@') {
            Some((name, version)) => (name.to_owned(), Some(version.trim_start_matches('@').to_owned())),
            None => (name.to_owned(), None),
        })
    };
    undefined.filter_map(split).collect()
}

/// Names of the symbols that a library defines.
fn defined_in(listing: &str) -> BTreeSet<String> {
    let fields = listing.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let defined = fields.filter(|fields| fields.get(6).is_some_and(|&section| section != "UND"));
    defined.filter_map(|fields| Some(fields.get(7)?.split('@').next()?.to_owned())).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    const SYMBOLS: &str = "\
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND rbd_open@LIBRBD_1.0 (5)
     2: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND nbd_create
     3: 0000000000000000     0 NOTYPE  WEAK   DEFAULT  UND __gmon_start__
     4: 0000000000001000    10 FUNC    GLOBAL DEFAULT   14 main
";

    #[test]
    fn undefined_symbols_are_found_with_their_versions() {
        let undefined = undefined_in(SYMBOLS);

        assert_eq!(undefined[0], ("rbd_open".to_owned(), Some("LIBRBD_1.0".to_owned())));
        assert_eq!(undefined[1], ("nbd_create".to_owned(), None));
        assert_eq!(undefined.len(), 2);
        assert!(defined_in(SYMBOLS).contains("main"));
    }

    #[test]
    fn a_version_belongs_to_the_libraries_that_need_it() {
        let listing = "Version needs section '.gnu.version_r'\n\
            \x20 000000: Version: 1  File: librbd.so.1  Cnt: 1\n\
            \x20 0x0010:   Name: LIBRBD_1.0  Flags: none  Version: 5\n";

        assert!(homes_of_versions(listing)["LIBRBD_1.0"].contains("librbd.so.1"));
    }
}
