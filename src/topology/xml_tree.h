// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace unisono::topology {

// One element of an XML document as plain data. The order of attributes and of children is kept.
struct XmlNode {
  struct Attribute {
    std::string name;
    std::string value;
  };

  std::string name;
  std::vector<Attribute> attributes;
  std::vector<XmlNode> children;
  int line = 0;  // where the element starts in the text that was read; 0: made by a program

  // The value of an attribute; null if it is absent.
  const std::string* find(std::string_view attribute) const;
  // Sets or replaces an attribute.
  void set(std::string_view attribute, std::string value);
  // Sets an attribute that is absent; an existing value stays.
  void setDefault(std::string_view attribute, std::string value);
  void erase(std::string_view attribute);
  // The reference holds until the next child is added.
  XmlNode& addChild(std::string_view childName);
};

// Limits for files, which anybody may have written.
struct XmlLimits {
  size_t bytes = 8u << 20;       // of the whole text
  int depth = 64;                // of nested elements
  int nodes = 65536;             // elements in all
  int attributes = 64;           // of one element
  size_t attributeBytes = 4096;  // of one attribute's name and of its value
};

// Parses one XML document strictly: one root element, no doctype, no entity definitions, no
// processing instruction, no text between elements, no attribute given twice, nothing cut off.
// `source` names the text in errors. Throws Error(invalidArgument) "SOURCE:LINE: cause".
XmlNode parseXml(std::string_view text, std::string_view source, const XmlLimits& limits = {});

// The document as text, two spaces an indentation, read back by parseXml to an equal tree.
std::string writeXml(const XmlNode& root);

// Values of attributes. Each throws Error(invalidArgument) that names source, line, element,
// attribute and value when the attribute is absent or not such a number.
class XmlReader {
 public:
  explicit XmlReader(std::string_view source) : source_(source) {}

  [[noreturn]] void fail(const XmlNode& node, const std::string& cause) const;

  const std::string& text(const XmlNode& node, std::string_view attribute) const;
  long long integer(const XmlNode& node, std::string_view attribute, long long low,
                    long long high) const;
  long long integerOr(const XmlNode& node, std::string_view attribute, long long low,
                      long long high, long long fallback) const;
  // In `base`, or hexadecimal with 0x.
  unsigned long long identifierOr(const XmlNode& node, std::string_view attribute,
                                  unsigned long long fallback, int base = 10) const;
  double number(const XmlNode& node, std::string_view attribute, double low, double high) const;
  double numberOr(const XmlNode& node, std::string_view attribute, double low, double high,
                  double fallback) const;

 private:
  std::string source_;
};

}  // namespace unisono::topology
