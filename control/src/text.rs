//! Texts for people: those of unknown origin made harmless, and errors with their causes.

use std::error::Error;

/// Text of unknown origin for people, without what could steer their terminal, turn the direction of writing or not be
/// seen: one name must not look like another.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || is_unseen(c) { '\u{fffd}' } else { c }).collect()
}

/// Whether a character that is no control character has an effect other than being seen.
fn is_unseen(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
        | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// An error and what caused it, in one line.
pub fn in_full(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| Error::source(cause));
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn untrusted_names_cannot_control_a_terminal() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
        assert_eq!(printable("web\u{202e}gpj.exe\u{200b}"), "web\u{fffd}gpj.exe\u{fffd}");
        assert_eq!(printable("データ شبكة №1"), "データ شبكة №1");
    }
}
