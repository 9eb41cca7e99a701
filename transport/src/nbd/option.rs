//! Parses the data of one option: lengths inside it are checked against the actual data.
//!
//! It knows nothing about exports or states. Data after the parsed value is an error.

use super::wire::STRING_MAX;

/// Data that does not have the format of its option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// NBD_OPT_INFO and NBD_OPT_GO: an export, and the information requested about it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExportQuery<'a> {
    pub(super) name: &'a [u8],
    pub(super) wanted: Vec<u16>,
}

/// NBD_OPT_LIST_META_CONTEXT and NBD_OPT_SET_META_CONTEXT: an export, and names of contexts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContextQuery<'a> {
    pub(super) name: &'a [u8],
    pub(super) contexts: Vec<&'a [u8]>,
}

impl<'a> ExportQuery<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<ExportQuery<'a>, Malformed> {
        let mut rest = Reader(data);
        let name = rest.string()?;
        let count = u16::from_be_bytes(rest.array()?);
        // The count may be larger than the data: `collect` ends at the first missing number.
        let wanted = (0..count).map(|_| rest.array().map(u16::from_be_bytes)).collect::<Result<_, _>>()?;
        rest.end().map(|()| ExportQuery { name, wanted })
    }
}

impl<'a> ContextQuery<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<ContextQuery<'a>, Malformed> {
        let mut rest = Reader(data);
        let name = rest.string()?;
        let count = u32::from_be_bytes(rest.array()?);
        let mut contexts = Vec::new();
        for _ in 0..count {
            contexts.push(rest.string()?);
        }
        rest.end().map(|()| ContextQuery { name, contexts })
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (now, later) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = later;
        Ok(now)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (now, later) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = later;
        Ok(*now)
    }

    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let len = usize::try_from(u32::from_be_bytes(self.array()?)).map_err(|_| Malformed)?;
        if len > STRING_MAX {
            return Err(Malformed);
        }
        self.bytes(len)
    }

    fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_export_query_has_a_name_and_requested_information() {
        let data = [0, 0, 0, 1, b'x', 0, 2, 0, 1, 0, 3];
        assert_eq!(ExportQuery::parse(&data), Ok(ExportQuery { name: b"x", wanted: vec![1, 3] }));
    }

    #[test]
    fn lengths_past_the_end_of_the_data_are_malformed() {
        assert_eq!(ExportQuery::parse(&[0, 0, 0, 9, b'x', 0, 0]), Err(Malformed));
        assert_eq!(ExportQuery::parse(&[0, 0, 0, 0, 0, 2, 0, 1]), Err(Malformed));
        assert_eq!(ExportQuery::parse(&[255, 255, 255, 255, 0, 0]), Err(Malformed));
        assert_eq!(ContextQuery::parse(&[0, 0, 0, 0, 255, 255, 255, 255]), Err(Malformed));
    }

    #[test]
    fn trailing_bytes_are_malformed() {
        assert_eq!(ExportQuery::parse(&[0, 0, 0, 0, 0, 0, 7]), Err(Malformed));
        assert_eq!(ContextQuery::parse(&[0, 0, 0, 0, 0, 0, 0, 0, 7]), Err(Malformed));
    }
}
