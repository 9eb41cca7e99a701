//! A Rust file with comments and literals blanked out, so that every word in it is code.
//!
//! This is a scanner, not a parser: it knows comments, literals, braces and `fn`, but neither types nor macros.

use std::ops::Range;
use std::path::{Component, Path, PathBuf};

/// A scanned Rust file.
pub struct Source {
    /// The path, relative to the root of the workspace.
    pub path: PathBuf,
    /// The original text.
    pub text: String,
    /// The same lines, with comments replaced by spaces and the inside of literals by quotes.
    pub code: String,
    /// Byte ranges of `code` that are only compiled for tests.
    tests: Vec<Range<usize>>,
}

/// A function with a body.
pub struct Function {
    /// Its name, without its path.
    pub name: String,
    /// The line of `fn`, counted from 1.
    pub line: usize,
    /// Lines of code from `fn` to the closing brace.
    pub lines: usize,
}

impl Source {
    /// Scans the text of a file.
    pub fn new(path: PathBuf, text: String) -> Source {
        let code = blank(&text);
        let tests =
            if is_test_file(&path) { Vec::from([Range { start: 0, end: code.len() }]) } else { test_ranges(&code) };
        Source { path, text, code, tests }
    }

    /// The line of the byte `at`, counted from 1.
    pub fn line_at(&self, at: usize) -> usize {
        self.code.as_bytes().iter().take(at).filter(|&&byte| byte == b'\n').count() + 1
    }

    /// Whether the byte `at` is only compiled for tests.
    pub fn is_test(&self, at: usize) -> bool {
        self.tests.iter().any(|range| range.contains(&at))
    }

    /// Lines of code outside of tests.
    pub fn lines(&self) -> usize {
        let mut at = 0;
        let mut count = 0;
        for line in self.code.split_inclusive('\n') {
            count += usize::from(!line.trim().is_empty() && !self.is_test(at));
            at += line.len();
        }
        count
    }

    /// The words of the code, with their offsets.
    pub fn words(&self) -> impl Iterator<Item = (usize, &str)> {
        words(&self.code)
    }

    /// The functions outside of tests that have a body.
    pub fn functions(&self) -> Vec<Function> {
        let words: Vec<(usize, &str)> = self.words().collect();
        let pairs = words.iter().zip(words.iter().skip(1));
        pairs
            .filter(|((at, word), (next, name))| {
                // `fn(u8)` is a type: it has no name, and the next word follows a parenthesis.
                let between = self.code.get(at + word.len()..*next).unwrap_or_default();
                *word == "fn" && between.trim().is_empty() && !name.is_empty() && !self.is_test(*at)
            })
            .filter_map(|((at, _), (next, name))| {
                let body = block_after(&self.code, next + name.len())?;
                let text = self.code.get(*at..body.end)?;
                let lines = text.lines().filter(|line| !line.trim().is_empty()).count();
                Some(Function { name: (*name).to_owned(), line: self.line_at(*at), lines })
            })
            .collect()
    }
}

/// Whether the whole file is a test, a benchmark or a fuzz target, according to its path.
fn is_test_file(path: &Path) -> bool {
    let directories = path.components().filter_map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    stem == "test" || directories.into_iter().any(|name| matches!(name, "test" | "tests" | "benches" | "fuzz"))
}

fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = code.get(at..)?;
        let from = at + rest.find(is_word)?;
        let word = code.get(from..)?;
        let len = word.find(|c| !is_word(c)).unwrap_or(word.len());
        at = from + len;
        Some((from, word.get(..len)?))
    })
}

/// The first block `{…}` from `from` on, outside of parentheses; `None` if a semicolon comes first.
fn block_after(code: &str, from: usize) -> Option<Range<usize>> {
    let mut nesting = 0usize;
    for (at, c) in code.get(from..)?.char_indices() {
        match c {
            '(' | '[' => nesting += 1,
            ')' | ']' => nesting = nesting.saturating_sub(1),
            ';' if nesting == 0 => return None,
            '{' if nesting == 0 => return Some(from + at..end_of_block(code, from + at)),
            _ => {}
        }
    }
    None
}

/// The offset after the brace that closes the one at `open`.
fn end_of_block(code: &str, open: usize) -> usize {
    let mut nesting = 0usize;
    for (at, c) in code.get(open..).unwrap_or_default().char_indices() {
        match c {
            '{' => nesting += 1,
            '}' => nesting = nesting.saturating_sub(1),
            _ => {}
        }
        if nesting == 0 {
            return open + at + 1;
        }
    }
    code.len()
}

/// The ranges after each `#[cfg(test)]`: a block, or an item that ends with a semicolon.
fn test_ranges(code: &str) -> Vec<Range<usize>> {
    code.match_indices("#[cfg(test)]")
        .map(|(at, attribute)| {
            let behind = at + attribute.len();
            let semicolon = || code.get(behind..).and_then(|rest| rest.find(';')).map(|found| behind + found + 1);
            let end = block_after(code, behind).map(|block| block.end).or_else(semicolon);
            at..end.unwrap_or(code.len())
        })
        .collect()
}

/// Replaces comments by spaces and the inside of literals by quotes; every line keeps its length in characters.
fn blank(text: &str) -> String {
    let mut scanner = Scanner { rest: text, code: String::with_capacity(text.len()) };
    while let Some(c) = scanner.rest.chars().next() {
        match c {
            '/' if scanner.rest.starts_with("//") => scanner.line_comment(),
            '/' if scanner.rest.starts_with("/*") => scanner.block_comment(),
            '"' => scanner.string(),
            '\'' => scanner.quote(),
            c if c.is_alphanumeric() || c == '_' => scanner.word(),
            _ => scanner.keep(c.len_utf8()),
        }
    }
    scanner.code
}

struct Scanner<'a> {
    rest: &'a str,
    code: String,
}

impl Scanner<'_> {
    fn take(&mut self, len: usize) -> &str {
        let (now, later) = self.rest.split_at(len.min(self.rest.len()));
        self.rest = later;
        now
    }

    fn keep(&mut self, len: usize) {
        let now = self.take(len).to_owned();
        self.code.push_str(&now);
    }

    fn replace(&mut self, len: usize, with: char) {
        let now: String = self.take(len).chars().map(|c| if c == '\n' { '\n' } else { with }).collect();
        self.code.push_str(&now);
    }

    fn line_comment(&mut self) {
        let len = self.rest.find('\n').unwrap_or(self.rest.len());
        self.replace(len, ' ');
    }

    fn block_comment(&mut self) {
        let mut depth = 0usize;
        let mut len = 0;
        while let Some(rest) = self.rest.get(len..).filter(|rest| !rest.is_empty()) {
            if rest.starts_with("/*") {
                depth += 1;
                len += 2;
            } else if rest.starts_with("*/") {
                depth -= 1;
                len += 2;
            } else {
                len += rest.chars().next().map_or(0, char::len_utf8);
            }
            if depth == 0 {
                break;
            }
        }
        self.replace(len, ' ');
    }

    /// Scans a string with escapes, from its first quote.
    fn string(&mut self) {
        let mut escaped = false;
        let end = self.rest.char_indices().skip(1).find(|&(_, c)| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let len = end.map_or(self.rest.len(), |(at, _)| at + 1);
        self.replace(len, '"');
    }

    /// Scans a character literal, or the tick of a lifetime.
    fn quote(&mut self) {
        let mut behind = self.rest.chars().skip(1);
        let len = match (behind.next(), behind.next()) {
            (Some('\\'), Some(escaped)) => {
                let from = 2 + escaped.len_utf8();
                self.rest.get(from..).and_then(|rest| rest.find('\'')).map(|at| from + at + 1)
            }
            (Some(c), Some('\'')) => Some(c.len_utf8() + 2),
            _ => None,
        };
        match len {
            Some(len) => self.replace(len, '"'),
            None => self.keep(1),
        }
    }

    /// Scans a word, or the raw string that it introduces.
    fn word(&mut self) {
        let len = self.rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(self.rest.len());
        let raw = matches!(self.rest.get(..len), Some("r" | "br" | "cr"));
        self.keep(len);
        let hashes = self.rest.chars().take_while(|&c| c == '#').count();
        if raw && self.rest.get(hashes..).is_some_and(|rest| rest.starts_with('"')) {
            let close = format!("\"{}", "#".repeat(hashes));
            let from = hashes + 1;
            let end = self.rest.get(from..).and_then(|rest| rest.find(&close));
            self.replace(end.map_or(self.rest.len(), |at| from + at + close.len()), '"');
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn source(text: &str) -> Source {
        Source::new(PathBuf::from("disk/src/x.rs"), text.to_owned())
    }

    #[test]
    fn words_in_comments_and_literals_are_no_words_of_the_program() {
        let text = "// unsafe\n/* unsafe /* unsafe */ unsafe */ let a = \"unsafe \\\" unsafe\";\nlet b = r#\"unsafe \" unsafe\"#; let c = b\"unsafe\";\n";
        let source = source(text);
        assert!(source.words().all(|(_, word)| word != "unsafe"), "{}", source.code);
        assert_eq!(source.words().filter(|&(_, word)| word == "let").count(), 3);
        assert_eq!(source.code.lines().count(), 3);
    }

    #[test]
    fn a_lifetime_is_not_a_character() {
        let source = source("fn f<'a>(x: &'a str) -> char { '\"' }\nfn g() -> char { '\\'' }\nfn h() { unsafe {} }\n");
        assert_eq!(source.functions().len(), 3);
        assert!(source.words().any(|(_, word)| word == "unsafe"));
    }

    #[test]
    fn lines_of_code_leave_out_comments_blank_lines_and_tests() {
        let text = "//! Head.\n\nfn f() {\n    // why\n    g();\n}\n\n#[cfg(test)]\nmod test {\n    fn t() {}\n}\n";
        assert_eq!(source(text).lines(), 3);
    }

    #[test]
    fn a_function_is_measured_from_its_name_to_its_brace() {
        let text = "trait T {\n    fn without(&self) -> [u8; 4];\n}\nfn with(\n    a: fn(u8) -> u8,\n) -> [u8; 4] {\n    // why\n    [a(1); 4]\n}\n";
        let functions = source(text).functions();
        assert_eq!(functions.len(), 1);
        let Some(function) = functions.first() else { unreachable!() };
        assert_eq!((function.name.as_str(), function.line, function.lines), ("with", 4, 5));
    }

    #[test]
    fn functions_of_tests_are_not_measured() {
        let text = "#[cfg(test)]\nmod test {\n    fn t() {}\n}\n#[cfg(test)]\nuse x;\nfn f() {}\n";
        let names: Vec<String> = source(text).functions().into_iter().map(|function| function.name).collect();
        assert_eq!(names, ["f"]);
    }

    #[test]
    fn files_in_test_directories_are_tests() {
        let text = "//! Head.\nfn f() {}\n".to_owned();
        assert_eq!(Source::new(PathBuf::from("disk/tests/x.rs"), text.clone()).lines(), 0);
        assert_eq!(Source::new(PathBuf::from("disk/src/vhd/test.rs"), text.clone()).lines(), 0);
        assert_eq!(Source::new(PathBuf::from("disk/src/vhd.rs"), text).lines(), 1);
    }
}
