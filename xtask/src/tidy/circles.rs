//! No module of a crate needs, by whatever way, one that needs it: a crate can be read from the bottom up.
//!
//! A module is here one that stands at the top of its crate, with all that is below it. Tests do not count.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Component, Path};

use super::Finding;
use super::source::Source;
use super::tree::Tree;

/// A circle that is known: `Daemon` holds what each part of the daemon keeps, and each part is given the `Daemon`.
const KNOWN: (&str, &[&str]) = (
    "taplined",
    &["autostart", "catalogue", "daemon", "directories", "http", "plug", "reconcile", "sr", "task", "vdi", "vm"],
);

/// Where a module names another one.
struct Use<'a> {
    source: &'a Source,
    at: usize,
}

/// The modules of a crate, each with those that it names.
type Uses<'a> = BTreeMap<&'a str, BTreeMap<&'a str, Use<'a>>>;

/// Every circle, at the line that closes it.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut crates: BTreeMap<&str, Vec<&Source>> = BTreeMap::new();
    for source in &tree.sources {
        if let Some((name, _)) = place(&source.path) {
            crates.entry(name).or_default().push(source);
        }
    }
    crates.into_iter().flat_map(|(name, sources)| circles(name, &uses(&sources))).collect()
}

/// The crate that a file belongs to, and its module there; none of what is no module of a crate.
fn place(path: &Path) -> Option<(&str, &str)> {
    let mut parts = path.components().filter_map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let (name, src, module) = (parts.next()?, parts.next()?, parts.next()?);
    (src == "src").then_some((name, module.strip_suffix(".rs").unwrap_or(module)))
}

fn uses<'a>(sources: &[&'a Source]) -> Uses<'a> {
    let modules: BTreeSet<&str> = sources.iter().filter_map(|source| Some(place(&source.path)?.1)).collect();
    let mut uses = Uses::new();
    for &source in sources {
        let Some((_, module)) = place(&source.path).filter(|(_, module)| !matches!(*module, "lib" | "main")) else {
            continue;
        };
        let named = source.words().filter(|(at, word)| *word == "crate" && !source.is_test(*at));
        for (at, _) in named {
            for name in named_after(source.code.get(at + "crate".len()..).unwrap_or_default()) {
                if name != module && modules.contains(name) {
                    uses.entry(module).or_default().entry(name).or_insert(Use { source, at });
                }
            }
        }
    }
    uses
}

/// The modules in `::one::…` or `::{one::…, other}`.
fn named_after(code: &str) -> Vec<&str> {
    let Some(path) = code.strip_prefix("::") else { return Vec::new() };
    let Some(group) = path.strip_prefix('{') else { return Vec::from([first_word(path)]) };
    let mut depth = 0;
    let mut names = Vec::from([first_word(group.trim_start())]);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => names.push(first_word(group.get(at + 1..).unwrap_or_default().trim_start())),
            _ => {}
        }
    }
    names
}

fn first_word(code: &str) -> &str {
    let end = code.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(code.len());
    code.get(..end).unwrap_or_default()
}

/// One finding for each module that is the first, by name, of a circle.
fn circles(name: &str, uses: &Uses<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for start in uses.keys() {
        let Some(circle) = way_back(start, uses) else { continue };
        let is_first = circle.iter().all(|module| module >= start);
        let is_known = name == KNOWN.0 && circle.iter().all(|module| KNOWN.1.contains(module));
        if is_first && !is_known {
            let last = circle.last().unwrap_or(start);
            let Use { source, at } = &uses[last][start];
            let what = format!(
                "{name} has a circle of modules, {} → {start}: move what this line needs below both",
                circle.join(" → ")
            );
            findings.push(Finding::new(&source.path, source.line_at(*at), what));
        }
    }
    findings
}

/// The shortest way from a module to one that names it.
fn way_back<'a>(start: &'a str, uses: &Uses<'a>) -> Option<Vec<&'a str>> {
    let mut seen = BTreeSet::from([start]);
    let mut ways = VecDeque::from([Vec::from([start])]);
    while let Some(way) = ways.pop_front() {
        let from = way.last()?;
        for &next in uses.get(from).into_iter().flat_map(BTreeMap::keys) {
            if next == start {
                return Some(way);
            }
            if seen.insert(next) {
                ways.push_back(way.iter().copied().chain([next]).collect());
            }
        }
    }
    None
}

#[cfg(test)]
mod test {
    use super::*;

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        let sources = files.iter().map(|(path, text)| Source::new((*path).into(), (*text).into())).collect();
        check(&Tree { sources, ..Tree::default() }).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_circle_is_found_once_where_it_closes() {
        let files = [
            ("a/src/lib.rs", "mod one; mod two; mod three; use crate::one::X;"),
            ("a/src/one.rs", "use crate::two::X;"),
            ("a/src/two/deep.rs", "//! Words: crate::one.\nuse crate::{Y, three::{X, Z}};"),
            ("a/src/three.rs", "\nfn f() { crate::one::g() }"),
            ("b/src/one.rs", "use crate::two;"),
            ("b/src/two.rs", "use crate::three;"),
        ];
        assert_eq!(
            findings(&files),
            ["a/src/three.rs:2: a has a circle of modules, one → two → three → one: move what this line needs below \
              both"]
        );
    }

    #[test]
    fn tests_and_the_known_circle_do_not_count() {
        assert!(
            findings(&[
                ("a/src/one.rs", "use crate::two;"),
                ("a/src/two.rs", "#[cfg(test)]\nmod test { use crate::one; }"),
                ("taplined/src/vm.rs", "use crate::daemon::Daemon;"),
                ("taplined/src/daemon.rs", "use crate::vm;"),
            ])
            .is_empty()
        );
        let more = [("taplined/src/vm.rs", "use crate::log;"), ("taplined/src/log.rs", "use crate::vm;")];
        assert_eq!(findings(&more).len(), 1);
    }
}
