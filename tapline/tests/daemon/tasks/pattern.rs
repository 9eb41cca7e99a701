//! Compares the output printed in a page with that of a command.

use std::iter::Peekable;
use std::str::Chars;

/// Whether the output matches the page.
pub fn matches(printed: &[&str], output: &[&str]) -> bool {
    match printed.split_first() {
        None => output.is_empty(),
        Some((&"…", rest)) => (0..=output.len()).any(|at| matches(rest, &output[at..])),
        Some((first, rest)) => {
            output.split_first().is_some_and(|(line, more)| line_matches(first, line) && matches(rest, more))
        }
    }
}

fn line_matches(printed: &str, output: &str) -> bool {
    let (printed, output) = (form(printed), form(output));
    let mut parts = printed.split('…');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = output.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// Replaces text that differs between runs by its form, and each run of spaces by one.
fn form(line: &str) -> String {
    let words = line.split_whitespace().map(word_form);
    let words: Vec<String> = words.collect();
    // The unit of a time is in the next word.
    let times = words.iter().zip(words.iter().skip(1).map(String::as_str).chain([""]));
    let is_unit = |word: &str| matches!(word.trim_end_matches([',', ')', ';', ':', '.']), "ms" | "µs" | "us" | "s");
    let is_number = |word: &str| word.trim_start_matches('(').chars().all(|c| c.is_ascii_digit() || c == '.');
    times
        .map(|(word, next)| if is_unit(next) && is_number(word) { "N".into() } else { word.clone() })
        .collect::<Vec<_>>()
        .join(" ")
}

/// Replaces UUIDs, their prefixes, and dates in a word by their form.
fn word_form(word: &str) -> String {
    let mut form = String::new();
    let mut chars = word.chars().peekable();
    while let Some(&c) = chars.peek() {
        if c.is_ascii_alphanumeric() {
            let run = run(&mut chars);
            form += match &run {
                run if is_uuid(run) => "UUID",
                run if is_date(run) => "DATE",
                run => run,
            };
        } else {
            form.push(c);
            chars.next();
        }
    }
    form
}

/// Takes letters and digits, with dashes and colons between them.
fn run(chars: &mut Peekable<Chars<'_>>) -> String {
    let mut run = String::new();
    while let Some(c) = chars.next_if(|&c| c.is_ascii_alphanumeric() || c == '-' || c == ':') {
        run.push(c);
    }
    run
}

fn is_uuid(run: &str) -> bool {
    let digits = run.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f' | '-'));
    let lengths: Vec<usize> = run.split('-').map(str::len).collect();
    digits && (lengths == [8, 4, 4, 4, 12] || lengths == [8])
}

fn is_date(run: &str) -> bool {
    let blank: String = run.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    ["0000-00-00", "0000-00-00T00:00", "0000-00-00T00:00:00", "0000-00-00T00:00:00Z", "00:00", "00:00:00"]
        .contains(&blank.as_str())
}

#[test]
fn only_what_differs_from_run_to_run_may_differ() {
    let same = [
        ("a b", "a   b"),
        ("UUID 9f1c3a50 x", "UUID 00000000 x"),
        ("1e9f1c3a-0000-4000-8000-0123456789ab", "ffff1c3a-0000-4000-8000-0123456789ab"),
        ("web@2026-11-23T02:07", "web@2027-01-01T00:00"),
        ("held for 13 us)", "held for 9.5 us)"),
        ("in … (free)", "in 3 GiB of 4 GiB (free)"),
    ];
    for (printed, output) in same {
        assert!(matches(&[printed], &[output]), "{printed}: {output}");
    }
    let other =
        [("a b", "ab"), ("20 GiB", "10 GiB"), ("web", "web2"), ("13 us", "13 MiB"), ("in … free", "in 3 GiB used")];
    for (printed, output) in other {
        assert!(!matches(&[printed], &[output]), "{printed}: {output}");
    }
}

#[test]
fn dots_alone_stand_for_any_lines() {
    assert!(matches(&["a", "…", "b"], &["a", "b"]));
    assert!(matches(&["a", "…", "b"], &["a", "x", "y", "b"]));
    assert!(!matches(&["a", "…", "b"], &["a", "x"]));
    assert!(!matches(&["a"], &["a", "b"]) && !matches(&["a", "b"], &["a"]));
}
