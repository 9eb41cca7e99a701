//! Checks that modules do not depend on each other in a circle, so that a crate can be read from the bottom up.
//!
//! A module of a directory is a file or a directory in it, with everything below. References to parent directories do
//! not count, because a parent contains what its children share. Tests do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use super::Finding;
use super::source::Source;
use super::tree::Tree;

/// A module with the shared state of its crate, which every part uses: circles through it do not count.
const HUB: (&str, &str) = ("taplined", "daemon");

/// Known circles: the directory, and the modules of the circle.
const KNOWN: &[(&str, &[&str])] = &[
    ("disk/qcow2/check", &["bitmaps", "snapshots", "walk"]),
    ("disk/vhd", &["create", "sparse"]),
    // Operations of a model: each is a part of its state and of its checks.
    ("model", &["check", "limits", "machines", "planted", "settings", "troubles", "verbs", "vm_snapshots", "world"]),
    ("repo/catalogue", &["image", "inventory"]),
    ("repo/driver", &["directory", "same_file"]),
    ("tapline/top", &["detail", "layer_table", "screen"]),
    // Starting a machine plugs its disks, and plugging a disk attaches it to a running machine.
    ("taplined", &["plug", "vm"]),
    ("taplined/http", &["access", "contract"]),
    // The start of a machine watches for its end, and a Xen guest that reboots is started again.
    ("taplined/vm", &["end", "start"]),
    ("transport/vhost_user", &["inflight", "ring"]),
    ("vm/qemu", &["accelerator", "account", "hardware"]),
    ("xtask/tidy", &["ratchet", "words"]),
];

/// The place where a module refers to another one.
struct Use<'a> {
    source: &'a Source,
    at: usize,
}

/// The modules of a directory, each with its references to others.
type Uses<'a> = BTreeMap<String, BTreeMap<String, Use<'a>>>;

/// Finds every circle, at a line that closes it, and every known circle that no longer exists.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut crates: BTreeMap<&str, Vec<(Vec<String>, &Source)>> = BTreeMap::new();
    for source in &tree.sources {
        if let Some((name, module)) = place(&source.path) {
            crates.entry(name).or_default().push((module, source));
        }
    }
    let mut findings = Vec::new();
    let mut found = BTreeSet::new();
    for (name, sources) in &crates {
        for (directory, uses) in directories(sources) {
            let directory = [&[(*name).to_owned()], directory.as_slice()].concat().join("/");
            for circle in circles(&directory, &uses) {
                let members: Vec<&str> = circle.iter().map(String::as_str).collect();
                if let Some(known) = KNOWN.iter().find(|known| **known == (directory.as_str(), members.as_slice())) {
                    found.insert(known);
                } else {
                    findings.push(finding(&directory, &members, &uses));
                }
            }
        }
    }
    let is_read = |known: &&(&str, &[&str])| crates.contains_key(known.0.split('/').next().unwrap_or_default());
    for (directory, members) in KNOWN.iter().filter(|known| is_read(known) && !found.contains(known)) {
        let what = format!("{directory} has no circle of {} alone any more: take it from the list", members.join(", "));
        findings.push(Finding::new(Path::new("xtask/src/tidy/circles.rs"), 1, what));
    }
    findings
}

fn finding(directory: &str, members: &[&str], uses: &Uses<'_>) -> Finding {
    let into = members.first().copied().unwrap_or_default();
    let closes = members.iter().find_map(|member| uses.get(*member)?.get(into));
    let what = format!("{directory} has a circle of modules, {}: move what they share below all", members.join(", "));
    match closes {
        Some(Use { source, at }) => Finding::new(&source.path, source.line_at(*at), what),
        None => Finding::new(Path::new(directory), 1, what),
    }
}

/// The crate of a file and its module path; `None` if it is not part of a crate.
fn place(path: &Path) -> Option<(&str, Vec<String>)> {
    let mut parts = path.components().filter_map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let (name, src) = (parts.next()?, parts.next()?);
    let mut module: Vec<String> = parts.map(|part| part.strip_suffix(".rs").unwrap_or(part).to_owned()).collect();
    let root = module.len() == 1 && module.first().is_some_and(|name| name == "lib" || name == "main");
    if root || module.last().is_some_and(|name| name == "mod") {
        module.pop();
    }
    (src == "src").then_some((name, module))
}

/// The references between the modules of each directory of a crate.
fn directories<'a>(sources: &[(Vec<String>, &'a Source)]) -> BTreeMap<Vec<String>, Uses<'a>> {
    let modules: BTreeSet<&[String]> =
        sources.iter().flat_map(|(module, _)| (0..=module.len()).filter_map(|len| module.get(..len))).collect();
    let mut all: BTreeMap<Vec<String>, Uses<'a>> = BTreeMap::new();
    for (module, source) in sources {
        for (at, path) in paths(source) {
            let Some(named) = resolve(module, &path, &modules) else { continue };
            let common = module.iter().zip(&named).take_while(|(one, other)| one == other).count();
            if let (Some(one), Some(other)) = (module.get(common), named.get(common)) {
                let uses = all.entry(module.iter().take(common).cloned().collect()).or_default();
                uses.entry(one.clone()).or_default().entry(other.clone()).or_insert(Use { source, at });
            }
        }
    }
    all
}

/// The module to which a path refers, or which contains the item.
fn resolve(module: &[String], path: &[&str], modules: &BTreeSet<&[String]>) -> Option<Vec<String>> {
    let mut named = if path.first() == Some(&"crate") { Vec::new() } else { module.to_vec() };
    for word in path {
        match *word {
            "crate" | "self" => {}
            "super" => drop(named.pop()?),
            word => {
                named.push(word.to_owned());
                if !modules.contains(named.as_slice()) {
                    named.pop();
                    break;
                }
            }
        }
    }
    Some(named)
}

/// All paths of a file that begin with `crate`, `super` or `self`, with their offsets.
fn paths(source: &Source) -> Vec<(usize, Vec<&str>)> {
    let mut paths = Vec::new();
    let mut behind = 0;
    for (at, word) in source.words() {
        if at >= behind && matches!(word, "crate" | "super" | "self") && !source.is_test(at) {
            let code = source.code.get(at..).unwrap_or_default();
            let mut found = Vec::new();
            let len = branches(code, &mut Vec::new(), &mut found);
            behind = at + len.max(word.len());
            paths.extend(found.into_iter().map(|path| (at, path)));
        }
    }
    paths
}

/// Expands a tree of imports, `one::{two, three::four}`, into paths; returns its length.
fn branches<'a>(code: &'a str, before: &mut Vec<&'a str>, found: &mut Vec<Vec<&'a str>>) -> usize {
    let skipped = code.len() - code.trim_start().len();
    let rest = code.get(skipped..).unwrap_or_default();
    if let Some(mut group) = rest.strip_prefix('{') {
        loop {
            let len = branches(group, before, found);
            group = group.get(len..).unwrap_or_default().trim_start();
            match group.strip_prefix(',') {
                Some(next) => group = next,
                None => return code.len() - group.strip_prefix('}').unwrap_or(group).len(),
            }
        }
    }
    let word = first_word(rest);
    if word.is_empty() {
        return skipped;
    }
    let behind = skipped + word.len();
    before.push(word);
    let len = match code.get(behind..).and_then(|code| code.strip_prefix("::")) {
        Some(next) if next.starts_with('{') || !first_word(next).is_empty() => {
            behind + 2 + branches(next, before, found)
        }
        _ => {
            found.push(before.clone());
            behind
        }
    };
    before.pop();
    len
}

fn first_word(code: &str) -> &str {
    let end = code.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(code.len());
    code.get(..end).unwrap_or_default()
}

/// Modules that depend on each other, each circle once, without the hub.
fn circles(directory: &str, uses: &Uses<'_>) -> Vec<Vec<String>> {
    let is_hub = |module: &str| (directory, module) == HUB;
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        uses.keys().filter(|from| !is_hub(from)).map(|from| (from.as_str(), reached(from, uses, &is_hub))).collect();
    let mut circles = BTreeSet::new();
    for (from, theirs) in &reach {
        let back = |to: &&str| reach.get(to).is_some_and(|theirs| theirs.contains(from));
        let circle: BTreeSet<String> = theirs.iter().copied().filter(back).map(str::to_owned).collect();
        if circle.len() > 1 {
            circles.insert(Vec::from_iter(circle));
        }
    }
    Vec::from_iter(circles)
}

/// The modules that one depends on, directly or indirectly.
fn reached<'a>(from: &str, uses: &'a Uses<'_>, is_hub: &impl Fn(&str) -> bool) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = Vec::from([from]);
    while let Some(module) = open.pop() {
        for next in uses.get(module).into_iter().flat_map(BTreeMap::keys).filter(|next| !is_hub(next)) {
            if reached.insert(next.as_str()) {
                open.push(next);
            }
        }
    }
    reached
}

#[cfg(test)]
mod test {
    use super::*;

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        let sources = files.iter().map(|(path, text)| Source::new((*path).into(), (*text).into())).collect();
        check(&Tree { sources, ..Tree::default() }).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_circle_is_found_once_in_its_directory() {
        let files = [
            ("a/src/lib.rs", "mod one; mod two; mod three; use crate::one::X;"),
            ("a/src/one.rs", "use crate::two::X;"),
            ("a/src/two/deep.rs", "//! Words: crate::one.\nuse crate::{Y, three::{X, Z}};\nuse super::other;"),
            ("a/src/two/other.rs", "\nuse super::{Q, deep};"),
            ("a/src/three.rs", "\nfn f() { crate::one::g() }"),
            ("b/src/one.rs", "use crate::two;"),
            ("b/src/two.rs", "use crate::three;"),
        ];
        assert_eq!(
            findings(&files),
            [
                "a/src/three.rs:2: a has a circle of modules, one, three, two: move what they share below all",
                "a/src/two/other.rs:2: a/two has a circle of modules, deep, other: move what they share below all"
            ]
        );
    }

    #[test]
    fn a_circle_that_is_not_the_shortest_is_found_too() {
        let files = [
            ("a/src/one.rs", "use crate::two; use crate::three;"),
            ("a/src/two.rs", "use crate::one;"),
            ("a/src/three.rs", "use crate::one;"),
        ];
        assert_eq!(findings(&files).len(), 1);
        assert!(findings(&files)[0].contains("one, three, two"));
    }

    #[test]
    fn tests_parents_and_the_hub_do_not_count() {
        let files = [
            ("a/src/one.rs", "mod deep; use crate::two;"),
            ("a/src/one/deep.rs", "use super::X; use crate::one::Y;"),
            ("a/src/two.rs", "#[cfg(test)]\nmod test { use crate::one; }"),
        ];
        assert_eq!(findings(&files), [""; 0]);
        let hub =
            [("taplined/src/log.rs", "use crate::daemon::Daemon;"), ("taplined/src/daemon.rs", "use crate::log;")];
        assert!(findings(&hub).iter().all(|finding| finding.contains("any more")));
    }
}
