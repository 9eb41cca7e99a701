//! The files of the workspace: Rust sources, manifests and pages.
//!
//! Hidden, built and generated files are excluded; everything else counts, whether committed or not.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::source::Source;

/// The files of the workspace.
#[derive(Default)]
pub struct Tree {
    /// Every Rust file, by path.
    pub sources: Vec<Source>,
    /// Every package's manifest, by path.
    pub manifests: Vec<Manifest>,
    /// Every page of Markdown, by path.
    pub pages: Vec<Page>,
    /// All other files, by path.
    pub others: BTreeSet<PathBuf>,
}

/// A page of Markdown.
pub struct Page {
    /// The path, relative to the root of the workspace.
    pub path: PathBuf,
    /// The original text.
    pub text: String,
}

/// A package's `Cargo.toml`.
pub struct Manifest {
    /// The path, relative to the root of the workspace.
    pub path: PathBuf,
    /// The name of the package.
    pub name: String,
    /// The original text, for line numbers.
    pub text: String,
    /// The parsed text.
    pub table: toml::Table,
}

impl Tree {
    /// Reads everything below `root`.
    pub fn read(root: &Path) -> Result<Tree, String> {
        let mut tree = Tree::default();
        tree.walk(root, Path::new(""))?;
        tree.sources.sort_by(|one, other| one.path.cmp(&other.path));
        tree.manifests.sort_by(|one, other| one.path.cmp(&other.path));
        tree.pages.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(tree)
    }

    fn walk(&mut self, root: &Path, below: &Path) -> Result<(), String> {
        let place = root.join(below);
        let failed = |error| format!("cannot read {}: {error}", place.display());
        for entry in fs::read_dir(&place).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let path = below.join(&name);
            let name = name.to_string_lossy();
            let kind = entry.file_type().map_err(failed)?;
            if kind.is_dir() && !is_left_out(&name) {
                self.walk(root, &path)?;
            } else if kind.is_file() && name.ends_with(".rs") {
                let text = read_text(root, &path)?;
                self.sources.push(Source::new(path, text));
            } else if kind.is_file() && name == "Cargo.toml" {
                self.manifests.extend(Manifest::parse(&path, read_text(root, &path)?)?);
            } else if kind.is_file() && name.ends_with(".md") {
                let text = read_text(root, &path)?;
                self.pages.push(Page { path, text });
            } else {
                self.others.insert(path);
            }
        }
        Ok(())
    }
}

impl Manifest {
    /// Parses a manifest; `None` if it defines only a workspace.
    pub fn parse(path: &Path, text: String) -> Result<Option<Manifest>, String> {
        let table: toml::Table = text.parse().map_err(|error| format!("{}: {error}", path.display()))?;
        let name = table.get("package").and_then(|package| package.get("name")).and_then(toml::Value::as_str);
        let Some(name) = name.map(str::to_owned) else { return Ok(None) };
        Ok(Some(Manifest { path: path.to_owned(), name, text, table }))
    }

    /// The line in `section` that begins with `key`, or the first line of the file.
    pub fn line_of(&self, section: &str, key: &str) -> usize {
        let mut inside = false;
        for (index, line) in self.text.lines().enumerate() {
            if line.trim_start().starts_with('[') {
                inside = line.trim().trim_matches(['[', ']']).ends_with(section);
            }
            let rest = line.trim_start().strip_prefix(key);
            if inside && rest.is_some_and(|rest| rest.trim_start().starts_with(['.', '='])) {
                return index + 1;
            }
        }
        1
    }
}

fn is_left_out(directory: &str) -> bool {
    directory.starts_with('.') || matches!(directory, "target" | "build" | "corpus")
}

fn read_text(root: &Path, path: &Path) -> Result<String, String> {
    fs::read_to_string(root.join(path)).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn built_and_hidden_directories_are_left_out() {
        let root = tempfile::tempdir().unwrap();
        for directory in ["a/src", "target/debug", ".git"] {
            fs::create_dir_all(root.path().join(directory)).unwrap();
            fs::write(root.path().join(directory).join("x.rs"), "//! X.\n").unwrap();
        }
        fs::write(root.path().join("Cargo.toml"), "[workspace]\nmembers = [\"a\"]\n").unwrap();
        fs::write(root.path().join("a/Cargo.toml"), "[package]\nname = \"a\"\n").unwrap();
        let tree = Tree::read(root.path()).unwrap();
        assert_eq!(
            tree.sources.iter().map(|source| source.path.as_path()).collect::<Vec<_>>(),
            [Path::new("a/src/x.rs")]
        );
        assert_eq!(tree.manifests.iter().map(|manifest| manifest.name.as_str()).collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn a_key_is_found_in_its_own_section() {
        let text = "[package]\nname = \"a\"\n[dev-dependencies]\ndisk.workspace = true\n[dependencies]\ndisk = \"1\"\n";
        let manifest = Manifest::parse(Path::new("Cargo.toml"), text.to_owned()).unwrap().unwrap();
        assert_eq!(manifest.line_of("dev-dependencies", "disk"), 4);
        assert_eq!(manifest.line_of("memory", "disk"), 1);
    }
}
