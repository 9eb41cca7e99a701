//! The parser of server-sent events (WHATWG HTML, 9.2.6), fed piece by piece.
//!
//! It knows lines and fields, but not what an event means. The messages do not depend on how the text is split into
//! pieces.

/// Maximum bytes of a message; an object with its envelope is far smaller.
const MESSAGE_MAX: usize = 4 << 20;

/// The part of the stream that has been received but not delivered.
#[derive(Debug, Default)]
pub struct Reader {
    /// An incomplete line.
    rest: Vec<u8>,
    message: Message,
}

/// A server-sent event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// The event's name.
    pub name: String,
    /// The event's number; later events have higher numbers.
    pub id: Option<u64>,
    /// The event's data.
    pub data: String,
}

/// The message is longer than any valid one.
#[derive(Debug, PartialEq, Eq)]
pub struct TooLong;

impl Reader {
    /// Takes a piece and adds the messages that it completes to `whole`.
    pub fn take(&mut self, piece: &[u8], whole: &mut impl Extend<Message>) -> Result<(), TooLong> {
        let mut lines = piece.split(|byte| *byte == b'\n');
        let Some(first) = lines.next() else { return Ok(()) };
        self.rest.extend_from_slice(first);
        for next in lines {
            let line = std::mem::replace(&mut self.rest, next.to_vec());
            let line = String::from_utf8_lossy(&line);
            whole.extend(self.line(line.strip_suffix('\r').unwrap_or(&line)));
        }
        if self.rest.len() + self.message.data.len() > MESSAGE_MAX { Err(TooLong) } else { Ok(()) }
    }

    /// An empty line ends a message; a line that starts with a colon is a comment.
    fn line(&mut self, line: &str) -> Option<Message> {
        if line.is_empty() {
            let message = std::mem::take(&mut self.message);
            return Some(message).filter(|message| !message.data.is_empty());
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.message.name),
            "id" => self.message.id = value.parse().ok(),
            "data" => {
                if !self.message.data.is_empty() {
                    self.message.data.push('\n');
                }
                self.message.data.push_str(value);
            }
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const TEXT: &str =
        ":\n\nevent: change\nid: 7\ndata: {\"a\":\ndata: 1}\n\r\n\r\nid: 8\nevent:reset\ndata: ü\nretry: 3\n\n";

    fn read(pieces: &[&[u8]]) -> Vec<Message> {
        let (mut reader, mut whole) = (Reader::default(), Vec::new());
        for piece in pieces {
            reader.take(piece, &mut whole).unwrap();
        }
        whole
    }

    #[test]
    fn messages_do_not_depend_on_chunking() {
        let all = read(&[TEXT.as_bytes()]);
        assert_eq!(all.len(), 2);
        assert_eq!(all[0], Message { name: "change".into(), id: Some(7), data: "{\"a\":\n1}".into() });
        assert_eq!(all[1], Message { name: "reset".into(), id: Some(8), data: "ü".into() });
        for at in 0..=TEXT.len() {
            let (left, right) = TEXT.as_bytes().split_at(at);
            assert_eq!(read(&[left, right]), all, "cut at {at}");
        }
    }

    #[test]
    fn an_endless_message_is_rejected() {
        let mut reader = Reader::default();
        let piece = vec![b'x'; MESSAGE_MAX / 2];
        assert_eq!(reader.take(&piece, &mut Vec::new()), Ok(()));
        assert_eq!(reader.take(&piece, &mut Vec::new()), Ok(()));
        assert_eq!(reader.take(b"x", &mut Vec::new()), Err(TooLong));
    }
}
