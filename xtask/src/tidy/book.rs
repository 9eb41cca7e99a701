//! The manual: `docs/SUMMARY.md`, from which mdBook makes a book, lists every page of `docs`, and no page of the
//! workspace has a link that leads nowhere. Addresses of other hosts are not looked at.

use std::path::{Component, Path, PathBuf};

use super::Finding;
use super::tree::{Page, Tree};
use super::words::without_code;

const MANUAL: &str = "docs";
const SUMMARY: &str = "docs/SUMMARY.md";

/// All that is wrong with pages and their links.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for page in &tree.pages {
        let links = links(page);
        findings.extend(links.iter().filter_map(|link| dead(tree, page, link)));
    }
    findings.extend(unlisted(tree));
    findings
}

/// A link to something in the workspace.
struct Link {
    line: usize,
    /// As written.
    target: String,
    /// The file, from the root of the workspace; `None` if it is above that.
    path: Option<PathBuf>,
    /// The heading in it, as a slug.
    heading: Option<String>,
}

fn links(page: &Page) -> Vec<Link> {
    let text = without_code(&page.text);
    let targets = text.match_indices("](").filter_map(|(at, open)| {
        let target = text.get(at + open.len()..)?;
        let target = target.get(..target.find(')')?)?;
        let line = text.get(..at)?.matches('\n').count() + 1;
        Some((line, target.to_owned()))
    });
    targets.filter(|(_, target)| !target.contains("://")).map(|(line, target)| link(page, line, target)).collect()
}

fn link(page: &Page, line: usize, target: String) -> Link {
    let (path, heading) =
        target.split_once('#').map_or((target.as_str(), None), |(path, it)| (path, Some(it.to_owned())));
    let directory = page.path.parent().unwrap_or(Path::new(""));
    let path = if path.is_empty() { Some(page.path.clone()) } else { resolved(&directory.join(path)) };
    Link { line, target, path, heading }
}

/// The path without `..`; `None` if it leads out of the workspace.
fn resolved(path: &Path) -> Option<PathBuf> {
    let mut resolved = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => resolved.push(name),
            Component::ParentDir => resolved.pop().then_some(())?,
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    Some(resolved)
}

/// Why a link leads nowhere, if it does.
fn dead(tree: &Tree, page: &Page, link: &Link) -> Option<Finding> {
    let finding = |what: String| Some(Finding::new(&page.path, link.line, what));
    let Some(path) = link.path.as_ref().filter(|path| exists(tree, path)) else {
        return finding(format!("the link leads nowhere: {}", link.target));
    };
    if page.path.starts_with(MANUAL) && !path.starts_with(MANUAL) {
        return finding(format!(
            "the link leads out of {MANUAL}, where the book has nothing: write `{}`",
            path.display()
        ));
    }
    let heading = link.heading.as_ref()?;
    let target = tree.pages.iter().find(|page| page.path == *path)?;
    let is_there = headings(&target.text).any(|one| one == *heading);
    if is_there { None } else { finding(format!("no heading of {} is #{heading}", path.display())) }
}

fn exists(tree: &Tree, path: &Path) -> bool {
    let sources = tree.sources.iter().map(|source| source.path.as_path());
    let manifests = tree.manifests.iter().map(|manifest| manifest.path.as_path());
    let pages = tree.pages.iter().map(|page| page.path.as_path());
    sources
        .chain(manifests)
        .chain(pages)
        .chain(tree.others.iter().map(PathBuf::as_path))
        .any(|one| one.starts_with(path))
}

/// The slugs by which links find the headings of a page, as GitHub and mdBook make them.
fn headings(text: &str) -> impl Iterator<Item = String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| {
        let letters = line.trim_start_matches('#').trim().to_lowercase();
        let kept = letters.chars().filter(|&c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

/// Pages of the manual that its summary does not list once, and a summary that is missing.
fn unlisted(tree: &Tree) -> Vec<Finding> {
    let Some(summary) = tree.pages.iter().find(|page| page.path == Path::new(SUMMARY)) else {
        return vec![Finding::new(Path::new(SUMMARY), 1, "the manual has no summary")];
    };
    let listed: Vec<PathBuf> = links(summary).into_iter().filter_map(|link| link.path).collect();
    let pages =
        tree.pages.iter().map(|page| &page.path).filter(|path| path.starts_with(MANUAL) && **path != summary.path);
    let count = |path: &&PathBuf| listed.iter().filter(|one| one == path).count();
    pages
        .filter(|path| count(path) != 1)
        .map(|path| Finding::new(path, 1, format!("{SUMMARY} lists the page {} times; once is right", count(&path))))
        .collect()
}

#[cfg(test)]
mod test {
    use super::*;

    fn findings(pages: &[(&str, &str)]) -> Vec<String> {
        let pages = pages.iter().map(|(path, text)| Page { path: PathBuf::from(path), text: (*text).to_owned() });
        let others = [PathBuf::from("docs/man/a.1"), PathBuf::from("tools/x")].into();
        let tree = Tree { pages: pages.collect(), others, ..Tree::default() };
        check(&tree).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn sound_links_are_no_findings() {
        let page = "# A b\n[x](b.md#over-the-network) [self](#a-b) [man](man/a.1) [all](man) \
                    [far](https://x.example/) `](gone)`\n";
        let summary = ("docs/SUMMARY.md", "- [a](a.md)\n- [b](b.md)\n");
        assert_eq!(findings(&[("docs/a.md", page), ("docs/b.md", "## Over the network\n"), summary]), [""; 0]);
    }

    #[test]
    fn dead_links_are_found_with_their_lines() {
        let page = "[x](gone.md)\n[y](#gone) [z](../tools/x) [up](../../x)\n";
        let found = findings(&[("docs/a.md", page), ("docs/SUMMARY.md", "[a](a.md)\n")]);
        assert_eq!(found.len(), 4, "{found:?}");
        assert_eq!(found[0], "docs/a.md:1: the link leads nowhere: gone.md");
        assert_eq!(found[1], "docs/a.md:2: no heading of docs/a.md is #gone");
        assert!(found[2].starts_with("docs/a.md:2: the link leads out of docs"));
        assert_eq!(found[3], "docs/a.md:2: the link leads nowhere: ../../x");
    }

    #[test]
    fn a_page_is_listed_once() {
        let found = findings(&[("docs/a.md", ""), ("docs/b.md", ""), ("docs/SUMMARY.md", "[a](a.md) [a](a.md)\n")]);
        assert_eq!(
            found,
            [
                "docs/a.md:1: docs/SUMMARY.md lists the page 2 times; once is right",
                "docs/b.md:1: docs/SUMMARY.md lists the page 0 times; once is right"
            ]
        );
        assert_eq!(findings(&[]), ["docs/SUMMARY.md:1: the manual has no summary"]);
    }
}
