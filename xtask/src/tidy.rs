//! The rules of the house that no compiler holds: `cargo xtask tidy`.
//!
//! It reads the files of the working tree and nothing else: no cargo, no git, no network. Every finding names a
//! file and a line; the chore fails when there is one. Lengths, widths of comments and words are held by a ratchet
//! ([`ratchet`]): what is too long today is recorded, and the record can only shrink.

mod arrows;
mod book;
mod circles;
mod ratchet;
mod rules;
mod source;
mod tree;
mod words;

use std::fmt;
use std::path::{Path, PathBuf};

use testbed::programs::root;

use ratchet::Ratchet;
use tree::Tree;

/// Where the recorded lengths live.
const RECORD: &str = "xtask/tidy-ratchet.toml";

/// Something that is against a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// The file, from the root of the workspace.
    path: PathBuf,
    /// The line, counted from 1.
    line: usize,
    /// What is wrong and what to do about it.
    what: String,
}

impl Finding {
    fn new(path: &Path, line: usize, what: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path.display(), self.line, self.what)
    }
}

/// Check the rules of the house: dependency arrows, unsafe code, lengths, heads of files, links and words of pages
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Lower recorded lengths to what they are now; none is ever raised
    #[arg(long)]
    tighten: bool,
}

/// Runs the chore.
pub fn run(options: &Options) -> Result<(), String> {
    if options.tighten { tighten(&root()) } else { report(check(&root())?) }
}

fn report(findings: Vec<Finding>) -> Result<(), String> {
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => {
            println!("tidy: every rule is kept");
            Ok(())
        }
        1 => Err("1 finding".into()),
        count => Err(format!("{count} findings")),
    }
}

/// All findings in the workspace at `root`, by file and line.
fn check(root: &Path) -> Result<Vec<Finding>, String> {
    let tree = Tree::read(root)?;
    let record = Ratchet::read(&root.join(RECORD))?;
    let mut findings = arrows::check(&tree);
    findings.extend(circles::check(&tree));
    for source in &tree.sources {
        findings.extend(rules::check(source));
    }
    findings.extend(rules::check_roots(&tree));
    findings.extend(book::check(&tree));
    findings.extend(record.check(&tree, Path::new(RECORD)));
    findings.sort();
    Ok(findings)
}

fn tighten(root: &Path) -> Result<(), String> {
    let tree = Tree::read(root)?;
    let place = root.join(RECORD);
    let record = Ratchet::read(&place)?.tightened(&tree);
    std::fs::write(&place, record.to_string()).map_err(|error| format!("cannot write {}: {error}", place.display()))?;
    println!("tidy: {RECORD} holds {} exceptions", record.len());
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn this_very_tree_can_be_read() {
        let tree = Tree::read(&root()).unwrap();
        assert!(tree.sources.iter().any(|source| source.path == Path::new("xtask/src/tidy.rs")));
        assert!(tree.manifests.iter().any(|manifest| manifest.name == "disk"));
    }

    #[test]
    fn a_finding_reads_as_file_line_and_reason() {
        let finding = Finding::new(Path::new("disk/src/lib.rs"), 7, "too long");
        assert_eq!(finding.to_string(), "disk/src/lib.rs:7: too long");
    }
}
