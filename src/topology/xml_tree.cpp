// SPDX-License-Identifier: Apache-2.0
#include "topology/xml_tree.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <pugixml.hpp>

#include "base/error.h"

namespace unisono::topology {

namespace {

// Turns offsets in the text into line numbers.
class LineIndex {
 public:
  explicit LineIndex(std::string_view text) {
    for (size_t i = 0; i < text.size(); i++) {
      if (text[i] == '\n') breaks_.push_back(static_cast<ptrdiff_t>(i));
    }
  }
  int at(ptrdiff_t offset) const {
    return 1 + static_cast<int>(std::lower_bound(breaks_.begin(), breaks_.end(), offset) -
                                breaks_.begin());
  }

 private:
  std::vector<ptrdiff_t> breaks_;
};

class Converter {
 public:
  Converter(std::string_view source, const LineIndex& lines, const XmlLimits& limits)
      : source_(source), lines_(lines), limits_(limits) {}

  [[noreturn]] void fail(ptrdiff_t offset, std::string_view cause) const {
    throw invalidArgument("{}:{}: {}", source_, lines_.at(offset), cause);
  }

  XmlNode convert(const pugi::xml_node& element, int depth) {
    const ptrdiff_t offset = element.offset_debug();
    if (depth > limits_.depth) {
      fail(offset, fmt::format("elements are nested deeper than {}", limits_.depth));
    }
    if (++nodes_ > limits_.nodes) fail(offset, fmt::format("more than {} elements", limits_.nodes));
    XmlNode node;
    node.name = checkedText(element.name(), offset, "the name of an element");
    node.line = lines_.at(offset);
    for (const pugi::xml_attribute& attribute : element.attributes()) {
      if (static_cast<int>(node.attributes.size()) >= limits_.attributes) {
        fail(offset,
             fmt::format("<{}> has more than {} attributes", node.name, limits_.attributes));
      }
      std::string name = checkedText(attribute.name(), offset, "the name of an attribute");
      if (node.find(name)) {
        fail(offset, fmt::format("<{}> has attribute {} twice", node.name, name));
      }
      std::string value = checkedText(attribute.value(), offset, "the value of an attribute");
      node.attributes.push_back({std::move(name), std::move(value)});
    }
    for (const pugi::xml_node& child : element.children()) {
      if (skipped(child)) continue;
      node.children.push_back(convert(child, depth + 1));
    }
    return node;
  }

  // Whether a node is to be passed over; fails for what a topology may not hold.
  bool skipped(const pugi::xml_node& node) const {
    switch (node.type()) {
      case pugi::node_comment:
      case pugi::node_declaration:
        return true;
      case pugi::node_element:
        return false;
      case pugi::node_doctype:
        fail(std::max<ptrdiff_t>(0, node.offset_debug()), "a DOCTYPE is not allowed");
      case pugi::node_pi:
        fail(std::max<ptrdiff_t>(0, node.offset_debug()),
             "a processing instruction is not allowed");
      default:
        fail(std::max<ptrdiff_t>(0, node.offset_debug()), "text between elements is not allowed");
    }
  }

 private:
  std::string checkedText(const char* text, ptrdiff_t offset, std::string_view what) const {
    const size_t length = std::strlen(text);
    if (length > limits_.attributeBytes) {
      fail(offset, fmt::format("{} is longer than {} bytes", what, limits_.attributeBytes));
    }
    return std::string(text, length);
  }

  std::string_view source_;
  const LineIndex& lines_;
  const XmlLimits& limits_;
  int nodes_ = 0;
};

// The parser's description, with the element's name where start and end tags do not match.
std::string describeFailure(const pugi::xml_parse_result& result,
                            const pugi::xml_document& document, std::string_view text) {
  if (result.status != pugi::status_end_element_mismatch) return result.description();
  const size_t offset = static_cast<size_t>(std::max<ptrdiff_t>(0, result.offset));
  if (offset + 1 >= text.size()) {
    return fmt::format("the text ends inside <{}>", document.document_element().name());
  }
  const size_t begin = text.rfind("</", offset);
  if (begin == std::string_view::npos) return result.description();
  const std::string_view tag = text.substr(begin + 2);
  return fmt::format("the end tag </{}> does not match the last open element",
                     tag.substr(0, std::min(tag.find_first_of("> \t\r\n"), size_t{64})));
}

void appendEscaped(std::string& out, std::string_view text) {
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        // Control characters would come back as spaces, or not at all.
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("&#{};", static_cast<int>(c));
        } else {
          out += c;
        }
    }
  }
}

void appendNode(std::string& out, const XmlNode& node, int depth) {
  out.append(static_cast<size_t>(depth) * 2, ' ');
  out += '<';
  out += node.name;
  for (const XmlNode::Attribute& attribute : node.attributes) {
    out += ' ';
    out += attribute.name;
    out += "=\"";
    appendEscaped(out, attribute.value);
    out += '"';
  }
  if (node.children.empty()) {
    out += "/>\n";
    return;
  }
  out += ">\n";
  for (const XmlNode& child : node.children) appendNode(out, child, depth + 1);
  out.append(static_cast<size_t>(depth) * 2, ' ');
  out += "</" + node.name + ">\n";
}

}  // namespace

const std::string* XmlNode::find(std::string_view attribute) const {
  for (const Attribute& entry : attributes) {
    if (entry.name == attribute) return &entry.value;
  }
  return nullptr;
}

void XmlNode::set(std::string_view attribute, std::string value) {
  for (Attribute& entry : attributes) {
    if (entry.name == attribute) {
      entry.value = std::move(value);
      return;
    }
  }
  attributes.push_back({std::string(attribute), std::move(value)});
}

void XmlNode::setDefault(std::string_view attribute, std::string value) {
  if (!find(attribute)) set(attribute, std::move(value));
}

void XmlNode::erase(std::string_view attribute) {
  std::erase_if(attributes, [&](const Attribute& entry) { return entry.name == attribute; });
}

XmlNode& XmlNode::addChild(std::string_view childName) {
  XmlNode& child = children.emplace_back();
  child.name = childName;
  return child;
}

XmlNode parseXml(std::string_view text, std::string_view source, const XmlLimits& limits) {
  if (text.size() > limits.bytes) {
    throw invalidArgument("{}:1: the text has more than {} bytes, the limit", source, limits.bytes);
  }
  const LineIndex lines(text);
  Converter converter(source, lines, limits);
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    converter.fail(static_cast<ptrdiff_t>(zero), "a zero byte is not allowed");
  }

  pugi::xml_document document;
  const pugi::xml_parse_result result = document.load_buffer(
      text.data(), text.size(), pugi::parse_full | pugi::parse_fragment, pugi::encoding_utf8);
  if (!result) {
    converter.fail(result.offset, describeFailure(result, document, text));
  }

  pugi::xml_node root;
  for (const pugi::xml_node& node : document.children()) {
    if (converter.skipped(node)) continue;
    if (root) converter.fail(node.offset_debug(), "a second root element is not allowed");
    root = node;
  }
  if (!root) throw invalidArgument("{}:1: there is no element", source);
  return converter.convert(root, 1);
}

std::string writeXml(const XmlNode& root) {
  std::string out;
  appendNode(out, root, 0);
  return out;
}

void XmlReader::fail(const XmlNode& node, const std::string& cause) const {
  // A node that a program made has no line.
  if (node.line == 0) throw invalidArgument("{}: <{}> {}", source_, node.name, cause);
  throw invalidArgument("{}:{}: <{}> {}", source_, node.line, node.name, cause);
}

const std::string& XmlReader::text(const XmlNode& node, std::string_view attribute) const {
  const std::string* value = node.find(attribute);
  if (!value) fail(node, fmt::format("has no attribute {}", attribute));
  return *value;
}

long long XmlReader::integer(const XmlNode& node, std::string_view attribute, long long low,
                             long long high) const {
  const std::string& value = text(node, attribute);
  long long number = 0;
  const bool hexadecimal = value.starts_with("0x") || value.starts_with("0X");
  const char* first = value.data() + (hexadecimal ? 2 : 0);
  const char* last = value.data() + value.size();
  const auto [end, error] = std::from_chars(first, last, number, hexadecimal ? 16 : 10);
  if (error != std::errc() || end != last || first == last || (hexadecimal && *first == '-')) {
    fail(node, fmt::format("has {}=\"{}\", which is not a whole number", attribute, value));
  }
  if (number < low || number > high) {
    fail(node, fmt::format("has {}=\"{}\", allowed are {} to {}", attribute, value, low, high));
  }
  return number;
}

long long XmlReader::integerOr(const XmlNode& node, std::string_view attribute, long long low,
                               long long high, long long fallback) const {
  const std::string* value = node.find(attribute);
  return value && !value->empty() ? integer(node, attribute, low, high) : fallback;
}

unsigned long long XmlReader::identifierOr(const XmlNode& node, std::string_view attribute,
                                           unsigned long long fallback, int base) const {
  const std::string* value = node.find(attribute);
  if (!value || value->empty()) return fallback;
  unsigned long long number = 0;
  const bool hexadecimal = value->starts_with("0x") || value->starts_with("0X");
  const char* first = value->data() + (hexadecimal ? 2 : 0);
  const char* last = value->data() + value->size();
  const auto [end, error] = std::from_chars(first, last, number, hexadecimal ? 16 : base);
  if (error != std::errc() || end != last || first == last) {
    fail(node, fmt::format("has {}=\"{}\", which is not a whole number of at most 64 bits",
                           attribute, *value));
  }
  return number;
}

double XmlReader::number(const XmlNode& node, std::string_view attribute, double low,
                         double high) const {
  const std::string& value = text(node, attribute);
  double number = 0;
  const char* last = value.data() + value.size();
  const auto [end, error] = std::from_chars(value.data(), last, number);
  if (error != std::errc() || end != last || !std::isfinite(number)) {
    fail(node, fmt::format("has {}=\"{}\", which is not a number", attribute, value));
  }
  if (number < low || number > high) {
    fail(node, fmt::format("has {}=\"{}\", allowed are {} to {}", attribute, value, low, high));
  }
  return number;
}

double XmlReader::numberOr(const XmlNode& node, std::string_view attribute, double low, double high,
                           double fallback) const {
  const std::string* value = node.find(attribute);
  return value && !value->empty() ? number(node, attribute, low, high) : fallback;
}

}  // namespace unisono::topology
