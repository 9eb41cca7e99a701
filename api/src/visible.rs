//! Text as shown to people: nothing in it moves the cursor, changes the writing direction or is invisible.
//!
//! Names are chosen by users, in any script, and are given to programs unchanged. Where they are displayed, one name
//! must not look like another, or like the program's own output.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a character has an effect other than being visible: control characters except line feed and tab, direction
/// marks, zero-width characters. Variation selectors of emoji are visible by their effect.
fn is_unseen(char: char) -> bool {
    match char {
        '\n' | '\t' => false,
        '\u{ad}' | '\u{34f}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' => true,
        '\u{890}' | '\u{891}' | '\u{8e2}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}' => true,
        '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' => true,
        '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' => true,
        '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' => true,
        '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}' => true,
        char => char.is_control(),
    }
}

/// The text, with such characters written as `\u{202e}`.
pub fn visible(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unseen) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len().saturating_add(16));
    for char in text.chars() {
        match is_unseen(char) {
            // Writing to a string cannot fail.
            true => write!(shown, "{}", char.escape_unicode()).unwrap_or_default(),
            false => shown.push(char),
        }
    }
    Cow::Owned(shown)
}

/// Refuses text that somebody chooses with such a character, and shows it.
pub(crate) fn refuse_unseen(what: &str, text: &str) -> Result<(), String> {
    let Some(found) = text.chars().find(|char| is_unseen(*char)) else { return Ok(()) };
    Err(format!(
        "{what} must not contain control characters, invisible ones or such that change the direction of text: '{}' \
         has U+{:04X}; remove it",
        visible(text),
        u32::from(found)
    ))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn invisible_characters_are_escaped_and_the_rest_is_unchanged() {
        for plain in ["web root №1", "データ", "شبكة", "a\n\tb", "❤\u{fe0f}", ""] {
            assert!(matches!(visible(plain), Cow::Borrowed(same) if same == plain), "{plain}");
        }
        assert_eq!(visible("web\u{202e}gpj.exe"), "web\\u{202e}gpj.exe");
        assert_eq!(visible("a\u{200b}b\u{1b}[2K"), "a\\u{200b}b\\u{1b}[2K");
        assert_eq!(visible("\u{feff}\u{2066}\u{e0041}"), "\\u{feff}\\u{2066}\\u{e0041}");
    }
}
