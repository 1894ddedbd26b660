//! Writes values in Python's pickle format, protocol 2 (PEP 307): only what JSON has.

use serde_json::Value;

/// A value as a pickle.
pub(super) fn to_bytes(value: &Value) -> Vec<u8> {
    let mut out = vec![0x80, 2];
    put(value, &mut out);
    out.push(b'.');
    out
}

fn put(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.push(b'N'),
        Value::Bool(true) => out.push(0x88),
        Value::Bool(false) => out.push(0x89),
        Value::Number(number) => match number.as_i64() {
            Some(number) => {
                // LONG1: the number of bytes, then a little-endian integer.
                out.extend([0x8a, 8]);
                out.extend(number.to_le_bytes());
            }
            None => {
                out.push(b'G');
                out.extend(number.as_f64().unwrap_or(f64::NAN).to_be_bytes());
            }
        },
        Value::String(text) => put_text(text, out),
        Value::Array(values) => {
            out.extend(b"](");
            values.iter().for_each(|value| put(value, out));
            out.push(b'e');
        }
        Value::Object(fields) => {
            out.extend(b"}(");
            for (name, value) in fields {
                put_text(name, out);
                put(value, out);
            }
            out.push(b'u');
        }
    }
}

fn put_text(text: &str, out: &mut Vec<u8>) {
    out.push(b'X');
    // A text of 4 GiB does not occur: the recordings are smaller.
    out.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_has_the_bytes_of_the_format() {
        let bytes = to_bytes(&json!({ "a": [null, true, -2] }));
        let expected = b"\x80\x02}(X\x01\0\0\0a](N\x88\x8a\x08\xfe\xff\xff\xff\xff\xff\xff\xffeu.";
        assert_eq!(bytes, expected);
    }
}
