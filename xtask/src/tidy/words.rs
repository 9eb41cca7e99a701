//! Finds discouraged words in pages, messages and comments.
//!
//! Pages and messages are for users and must contain none. For comments there is a ratchet. Identifiers, and text
//! between backticks, are not prose.

use std::path::Path;

use super::ratchet::Measured;
use super::source::Source;
use super::tree::Tree;

/// Discouraged words, each with replacements.
const WORDS: &[(&str, &str)] = &[
    ("told", "sent, notified, printed, given"),
    ("heard", "received"),
    ("hears", "receives"),
    ("asked", "requested, queried"),
    ("asks", "requests, requires, queries, or the verb itself"),
    ("so many", "the number"),
    ("so much", "the amount"),
    ("anew", "again, or a verb with re-"),
    ("nobody", "no process, no client; or the passive"),
    ("whoever", "the process that, the user who"),
    ("in vain", "without success"),
    ("mend", "fix, repair"),
    ("mends", "fixes, repairs"),
    ("mended", "fixed, repaired"),
    ("go on", "continue"),
    ("goes on", "continues"),
    ("going on", "in progress"),
    ("went on", "continued"),
    ("gone on", "continued"),
    ("is none", "is not one, does not exist"),
    ("are none", "are not ones, do not exist"),
    ("comes besides", "is added"),
    ("beside", "next to, with"),
    ("believed", "trusted, used"),
    ("owed", "pending"),
    ("farewell", "disconnection"),
];

/// An occurrence of a word of [`WORDS`] in a text.
#[derive(Debug, PartialEq, Eq)]
struct Occurrence {
    /// The line, counted from 1.
    line: usize,
    word: &'static str,
    better: &'static str,
}

/// Occurrences in Markdown pages, by page.
pub fn in_pages(tree: &Tree) -> Measured {
    measured(tree.pages.iter().map(|page| (page.path.as_path(), occurrences(&prose(&page.text)))))
}

/// Occurrences in string literals of programs, by file.
pub fn in_messages(tree: &Tree) -> Measured {
    measured(programs(tree).map(|source| (source.path.as_path(), occurrences(&literals(source)))))
}

/// Occurrences in comments of programs, by file. Some of these comments are the help of commands.
pub fn in_comments(tree: &Tree) -> Measured {
    measured(programs(tree).map(|source| (source.path.as_path(), occurrences(&comments(source)))))
}

/// Sources of installed programs: `xtask` contains the words, and tests, benches and models have no users.
fn programs(tree: &Tree) -> impl Iterator<Item = &Source> {
    let is_program = |path: &Path| {
        let package = path.iter().next().and_then(|name| name.to_str()).unwrap_or_default();
        !matches!(
            package,
            "xtask" | "testbed" | "testkit" | "sim" | "model" | "oracle" | "fuzz" | "benches" | "clients"
        )
    };
    tree.sources.iter().filter(move |source| is_program(&source.path) && !source.is_test(0))
}

fn measured<'a>(files: impl Iterator<Item = (&'a Path, Vec<Occurrence>)>) -> Measured {
    let entry = |(path, found): (&Path, Vec<Occurrence>)| {
        let first = found.first()?;
        let note = format!("'{}': {}", first.word, first.better);
        Some((path.display().to_string(), (first.line, found.len(), note)))
    };
    files.filter_map(entry).collect()
}

/// The words in `text`, in which everything except prose is blank.
fn occurrences(text: &str) -> Vec<Occurrence> {
    let mut found: Vec<Occurrence> = Vec::new();
    let words = words(text);
    for (first, &(at, _)) in words.iter().enumerate() {
        let hit = WORDS.iter().find(|(phrase, _)| begins_with(text, words.get(first..).unwrap_or_default(), phrase));
        let Some(&(word, better)) = hit else { continue };
        let before = words.get(first.wrapping_sub(1)).map(|&(_, word)| word);
        // A name in quotes, such as the user 'nobody', or that of a value in braces.
        let is_quoted = text.get(..at).is_some_and(|text| text.ends_with(['"', '\'', '{']));
        // 'There is none' is a correct sentence.
        if is_quoted || (word.ends_with("none") && before.is_some_and(|word| word.eq_ignore_ascii_case("there"))) {
            continue;
        }
        let line = text.get(..at).unwrap_or_default().matches('\n').count() + 1;
        found.push(Occurrence { line, word, better });
    }
    found
}

/// The words of a text with their offsets; a word with a dash or an underscore is one.
fn words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut from = None;
    for (at, c) in text.char_indices().chain([(text.len(), ' ')]) {
        let is_word = c.is_alphanumeric() || matches!(c, '_' | '-');
        match from {
            None if is_word => from = Some(at),
            Some(begin) if !is_word => {
                words.extend(text.get(begin..at).map(|word| (begin, word)));
                from = None;
            }
            _ => {}
        }
    }
    words
}

/// Whether these words begin with the phrase, separated only by space.
fn begins_with(text: &str, words: &[(usize, &str)], phrase: &str) -> bool {
    let mut end = None;
    let mut words = words.iter();
    phrase.split(' ').all(|part| {
        words.next().is_some_and(|&(at, word)| {
            let gap = end.map_or("", |end| text.get(end..at).unwrap_or("?"));
            end = Some(at + word.len());
            word.eq_ignore_ascii_case(part) && gap.trim().is_empty()
        })
    })
}

/// A page with code and link targets blanked out; lines are kept.
fn prose(text: &str) -> String {
    without_targets(&without_code(text))
}

/// A page with code blanked out: blocks, and text between backticks. Lines are kept.
pub fn without_code(text: &str) -> String {
    let mut fenced = false;
    let mut prose = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let is_fence = line.trim_start().starts_with("```");
        fenced ^= is_fence;
        if fenced || is_fence || line.starts_with("    ") {
            prose.push('\n');
        } else {
            prose.push_str(line);
        }
    }
    without_spans(&prose)
}

/// A text with text between backticks blanked out; an empty line ends an unclosed span.
fn without_spans(text: &str) -> String {
    let mut inside = false;
    let mut blank = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        inside &= !line.trim().is_empty();
        for c in line.chars() {
            inside ^= c == '`';
            blank.push(if inside && c != '\n' { '.' } else { c });
        }
    }
    blank
}

fn without_targets(text: &str) -> String {
    let mut rest = text;
    let mut prose = String::with_capacity(text.len());
    while let Some(at) = rest.find("](") {
        let (before, target) = rest.split_at(at + 2);
        let end = target.find(')').unwrap_or(target.len());
        prose.push_str(before);
        rest = target.get(end..).unwrap_or_default();
    }
    prose + rest
}

/// The literals of a file; everything else, and tests, are blanked out.
fn literals(source: &Source) -> String {
    let mut text = select(source, |code, _| code == '"', '.');
    // Escapes: a backslash before the end of a line, or a letter that stands for a character.
    for escape in ["\\n", "\\t", "\\\n"] {
        text = text.replace(escape, if escape.ends_with('\n') { " \n" } else { "  " });
    }
    text
}

/// The comments of a file, without slashes; everything else, and tests, are blanked out.
fn comments(source: &Source) -> String {
    let text = select(source, |code, _| code == ' ', ' ');
    without_spans(&text.replace("//!", "   ").replace("///", "   ").replace("//", "  "))
}

/// Characters of a file that `choose` selects by their blanked code, outside of tests; others become `blank`.
fn select(source: &Source, choose: impl Fn(char, char) -> bool, blank: char) -> String {
    let mut at = 0;
    let mut chosen = String::with_capacity(source.text.len());
    for (code, text) in source.code.chars().zip(source.text.chars()) {
        let is_chosen = choose(code, text) && !source.is_test(at);
        chosen.push(if text == '\n' || is_chosen { text } else { blank });
        at += code.len_utf8();
    }
    chosen
}

#[cfg(test)]
mod test {
    use std::path::PathBuf;

    use super::*;

    fn found(text: &str) -> Vec<(usize, &str)> {
        occurrences(&prose(text)).into_iter().map(|one| (one.line, one.word)).collect()
    }

    #[test]
    fn words_are_found_across_lines_and_in_any_case() {
        assert_eq!(
            found("It is told.\nNobody goes\non so\n  many times."),
            [(1, "told"), (2, "nobody"), (2, "goes on"), (3, "so many")]
        );
        assert_eq!(found("a time that is none"), [(1, "is none")]);
    }

    #[test]
    fn code_links_and_longer_words_are_no_prose() {
        let text =
            "`nobody`, [x](beside.md), besides, asked-for. There is none.\n\n    told\n\n```\ntold\n```\n\"nobody\"\n";
        assert_eq!(found(text), []);
        assert_eq!(found("`a\n\nb told"), [(3, "told")]);
    }

    #[test]
    fn messages_and_comments_of_programs_are_searched_apart() {
        let text = "//! Told.\nfn f() { g(\"it goes \\\n    on, beside {anew}\") } // `asked`\n#[cfg(test)]\nmod test \
                    { const A: &str = \"told\"; }\n";
        let source = |path: &str| Source::new(PathBuf::from(path), text.to_owned());
        let tree = Tree { sources: vec![source("a/src/x.rs"), source("sim/src/x.rs")], ..Tree::default() };
        let lines = |measured: Measured| {
            measured.into_iter().map(|(path, (line, count, _))| (path, line, count)).collect::<Vec<_>>()
        };
        assert_eq!(lines(in_comments(&tree)), [("a/src/x.rs".to_owned(), 1, 1)]);
        assert_eq!(lines(in_messages(&tree)), [("a/src/x.rs".to_owned(), 2, 2)]);
    }
}
